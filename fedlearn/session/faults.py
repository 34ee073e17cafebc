"""What goes wrong in the user's code: said to the user with its place, to nobody else."""

import sysconfig
import threading
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from fedlearn.errors import DeploymentError, FedlearnError

_FEDLEARN = Path(__file__).resolve().parents[1]
#: Where libraries are; what lies elsewhere is more likely to be the cause.
_INSTALLED = tuple(
    Path(sysconfig.get_path(name)).resolve() for name in ("stdlib", "purelib", "platlib")
)


def described(error: BaseException) -> str:
    """Return where an error comes from, its type and its message: for this device alone.

    The place is the innermost line of the user's own code, else of a library.

    Example:
        >>> described(KeyError("PART"))
        "KeyError: 'PART'"
    """
    words = f"{type(error).__name__}: {error}".removesuffix(": ")
    frames = [each for each in traceback.extract_tb(error.__traceback__) if _is_foreign(each)]
    own = [each for each in frames if not _is_in(each, _INSTALLED)]
    if not frames:
        return words
    frame = (own or frames)[-1]
    return f"{frame.filename}:{frame.lineno}, in {frame.name}: {words}"


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
    return str(error) if isinstance(error, FedlearnError) else described(error)


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
        raise DeploymentError(f"{described(error)}; mend the trainer") from error


def _is_foreign(frame: traceback.FrameSummary) -> bool:
    """Return whether a frame is neither fedlearn's nor the import system's, which has no file."""
    return not frame.filename.startswith("<") and not _is_in(frame, (_FEDLEARN,))


def _is_in(frame: traceback.FrameSummary, folders: tuple[Path, ...]) -> bool:
    path = Path(frame.filename).resolve()
    return any(path.is_relative_to(folder) for folder in folders)
