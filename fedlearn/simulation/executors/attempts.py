"""Which clients of a block fail, where training it raises an error."""

from collections.abc import Callable, Iterator, Sequence
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from fedlearn.errors import EngineError
from fedlearn.session.faults import is_failure

ResultT = TypeVar("ResultT")


def attempts(
    train: Callable[[NDArray[np.int64]], ResultT],
    block: NDArray[np.int64],
    errors: dict[int, BaseException],
) -> Iterator[tuple[NDArray[np.int64], ResultT]]:
    """Train a block; yield the places of the clients that trained, and what they give.

    Where the block raises, its clients are tried one by one. The others train as a block again, so
    that what they give does not depend on the clients that failed.

    Args:
        train: Trains the clients at some places.
        block: The places: shape [n].
        errors: Filled with the error of each client that fails, by place.

    Raises:
        EngineError: The executor cannot do what it is asked, whichever clients train.
    """
    trained = _attempt(train, block, errors)
    if trained is not None:
        yield block, trained
    elif len(block) > 1:
        singles = [block[place : place + 1] for place in range(len(block))]
        yield from _retries(train, [s for s in singles if _attempt(train, s, errors)], errors)


def _retries(
    train: Callable[[NDArray[np.int64]], ResultT],
    singles: Sequence[NDArray[np.int64]],
    errors: dict[int, BaseException],
) -> Iterator[tuple[NDArray[np.int64], ResultT]]:
    """Train clients together that each trained alone; where that fails, one by one."""
    if not singles:
        return
    together = np.concatenate(singles)
    trained = _attempt(train, together, errors) if errors else None
    if trained is not None:
        yield together, trained
        return
    for single in singles:  # each has memory enough, for one
        if (trained := _attempt(train, single, errors)) is not None:
            yield single, trained


def _attempt(
    train: Callable[[NDArray[np.int64]], ResultT],
    block: NDArray[np.int64],
    errors: dict[int, BaseException],
) -> ResultT | None:
    """Return what clients give, or ``None`` if they raise; the error of a single one is noted."""
    try:
        return train(block)
    except EngineError:
        raise
    except BaseException as error:  # a client boundary: user code raises anything
        if not is_failure(error):
            raise
        if len(block) == 1:
            errors[int(block[0])] = error
        return None
