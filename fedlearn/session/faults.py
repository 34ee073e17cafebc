"""Errors raised by custom code: which ones are client failures, and how the user sees them."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager

from fedlearn.core.own_lines import describe_error
from fedlearn.errors import DeploymentError, FedlearnError


def is_failure(error: BaseException) -> bool:
    """Check whether an error raised by custom code counts as a client failure.

    Everything does, ``sys.exit`` included, except a KeyboardInterrupt in the main thread: that is
    Ctrl-C and ends the run. In any other thread, only code can raise one.

    Example:
        >>> is_failure(SystemExit(3)), is_failure(KeyboardInterrupt())
        (True, False)
    """
    in_main = threading.current_thread() is threading.main_thread()
    return not (in_main and isinstance(error, KeyboardInterrupt))


def describe_failure(error: BaseException) -> str:
    """Describe why a client failed; an error that is not fedlearn's gets its source location."""
    return str(error) if isinstance(error, FedlearnError) else describe_error(error)


@contextmanager
def convert_trainer_errors() -> Iterator[None]:
    """Run custom code, such as a trainer factory, and convert its errors.

    Raises:
        DeploymentError: The code raised an error; the message names it and its source location.
            fedlearn's own errors pass through, since their messages already explain themselves.
    """
    try:
        yield
    except FedlearnError:
        raise
    except BaseException as error:  # custom code raises anything: one of three in the project
        if not is_failure(error):
            raise
        raise DeploymentError(f"{describe_error(error)}; fix the trainer") from error
