"""Isolates the failing clients of a block, if training the block raises an error."""

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
    """Train a block; yield the clients that trained, by their places, with their result.

    If the block raises, its clients are tried one by one. Those that succeed then train again as a
    block, so that their result does not depend on the clients that failed.

    Args:
        train: Trains the clients at the given places.
        block: Places of the clients: shape [n].
        errors: Receives the error of each client that fails, by place.

    Raises:
        EngineError: The executor cannot do this work at all, whichever clients train.
    """
    trained = _attempt(train, block, errors)
    if trained is not None:
        yield block, trained
    elif len(block) > 1:
        # One by one, not by halves: each client needs its own verdict and error.
        singles = [block[place : place + 1] for place in range(len(block))]
        yield from _retries(train, [s for s in singles if _attempt(train, s, errors)], errors)


def _retries(
    train: Callable[[NDArray[np.int64]], ResultT],
    singles: Sequence[NDArray[np.int64]],
    errors: dict[int, BaseException],
) -> Iterator[tuple[NDArray[np.int64], ResultT]]:
    """Train clients together that each succeeded alone; if that fails, one by one."""
    if not singles:
        return
    # As a block once more: stacked training rounds differently from training one at a time.
    together = np.concatenate(singles)
    # Without a single failure the block itself is the problem, and would fail again.
    trained = _attempt(train, together, errors) if errors else None
    if trained is not None:
        yield together, trained
        return
    for single in singles:  # together they may lack memory, but each one alone has enough
        if (trained := _attempt(train, single, errors)) is not None:
            yield single, trained


def _attempt(
    train: Callable[[NDArray[np.int64]], ResultT],
    block: NDArray[np.int64],
    errors: dict[int, BaseException],
) -> ResultT | None:
    """Train some clients; return ``None`` if they fail, and record the error of a single client."""
    try:
        return train(block)
    except EngineError:
        raise
    except BaseException as error:  # a client boundary: custom code may raise anything
        if not is_failure(error):
            raise
        if len(block) == 1:
            errors[int(block[0])] = error
        return None
