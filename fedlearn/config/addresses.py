"""Where this machine keeps things: from the tree, the environment, or defaults."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from fedlearn.config.redaction import without_password
from fedlearn.config.tree import Config

_DEFAULT_RUNS_DIR = "runs"
_DEFAULT_DATA_DIR = "../shared/data"


@dataclass(frozen=True, kw_only=True)
class Addresses:
    """Where this machine keeps things. Not part of the tree: the URL may hold a password.

    Attributes:
        store_url: SQLAlchemy URL; ``None`` is SQLite in ``runs_dir``. Not printed.
        runs_dir: Directory of the runs.
        data_dir: Directory of the data sets.
    """

    store_url: str | None = field(repr=False)
    runs_dir: Path
    data_dir: Path


def resolve_addresses(config: Config, *, environ: Mapping[str, str]) -> Addresses:
    """Return the addresses: what the configuration says, else the environment, else defaults.

    A database URL in the environment that is the configuration's plus a password is used.

    Args:
        config: The tree.
        environ: Environment variables: ``FEDLEARN_STORE_URL``, ``FEDLEARN_RUNS_DIR``,
            ``FEDLEARN_DATA_DIR``; an empty one counts as not set.

    Example:
        >>> resolve_addresses(Config(), environ={"FEDLEARN_RUNS_DIR": "/srv/runs"}).runs_dir
        PosixPath('/srv/runs')
    """
    given = environ.get("FEDLEARN_STORE_URL") or None
    url = config.store.url
    if url is None or (given is not None and without_password(given) == url):
        url = given
    runs_dir = config.store.runs_dir or environ.get("FEDLEARN_RUNS_DIR") or _DEFAULT_RUNS_DIR
    data_dir = environ.get("FEDLEARN_DATA_DIR") or _DEFAULT_DATA_DIR
    return Addresses(store_url=url, runs_dir=Path(runs_dir), data_dir=Path(data_dir))
