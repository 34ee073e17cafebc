"""What goes wrong in the user's code: said to the user with its place, to nobody else."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager

from fedlearn.core.user_lines import describe_error
from fedlearn.errors import DeploymentError, FedlearnError


def is_failure(error: BaseException) -> bool:
    """Return whether an error of the user's code is a client's failure, as ``sys.exit`` is.

    A KeyboardInterrupt in the main thread is Ctrl-C, and ends the run. In another thread only code
    raises one.

    Example:
        >>> is_failure(SystemExit(3)), is_failure(KeyboardInterrupt())
        (True, False)
    """
    in_main = threading.current_thread() is threading.main_thread()
    return not (in_main and isinstance(error, KeyboardInterrupt))


def reason_for(error: BaseException) -> str:
    """Return why a client failed: an error of fedlearn's says it all, another with its place."""
    return str(error) if isinstance(error, FedlearnError) else describe_error(error)


@contextmanager
def in_users_code() -> Iterator[None]:
    """Run code of the user's, such as what makes a trainer.

    Raises:
        DeploymentError: It raised something, which this names with its place. An error of
            fedlearn's has a message already, and passes.
    """
    try:
        yield
    except FedlearnError:
        raise
    except BaseException as error:  # user code raises anything: one of three in the project
        if not is_failure(error):
            raise
        raise DeploymentError(f"{describe_error(error)}; mend the trainer") from error
