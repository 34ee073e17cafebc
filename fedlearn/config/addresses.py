"""Locate the store, runs and data sets: from the tree, else the environment, else defaults."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from fedlearn.config.serving import HasStore
from fedlearn.core.redaction import remove_password


@dataclass(frozen=True, kw_only=True)
class Addresses:
    """Locations on this machine. They are not part of the tree: the URL may hold a password.

    Attributes:
        store_url: SQLAlchemy URL; ``None`` is SQLite in ``runs_dir``. Not printed.
        runs_dir: Directory of the runs.
        data_dir: Directory of the data sets.
    """

    store_url: str | None = field(repr=False)
    runs_dir: Path
    data_dir: Path


def resolve_addresses(
    config: HasStore,
    *,
    environ: Mapping[str, str],
    runs_dir: Path | None = None,
    data_dir: Path | None = None,
) -> Addresses:
    """Resolve the addresses. The environment may add a password to ``config.store.url``.

    Args:
        config: The tree.
        environ: Environment variables: ``FEDLEARN_STORE_URL``, ``FEDLEARN_RUNS_DIR``,
            ``FEDLEARN_DATA_DIR``; an empty one counts as not set.
        runs_dir: If given, used in place of ``config`` and the environment.
        data_dir: Likewise.

    Example:
        >>> from fedlearn.config import Config
        >>> resolve_addresses(Config(), environ={"FEDLEARN_RUNS_DIR": "/srv/runs"}).runs_dir
        PosixPath('/srv/runs')
    """
    given = environ.get("FEDLEARN_STORE_URL") or None
    url = config.store.url
    # The tree must not hold a password, so the environment may give the same URL with one.
    if url is None or (given is not None and remove_password(given) == url):
        url = given
    runs = config.store.runs_dir or environ.get("FEDLEARN_RUNS_DIR") or "runs"
    data = environ.get("FEDLEARN_DATA_DIR") or "../shared/data"
    return Addresses(
        store_url=url, runs_dir=runs_dir or Path(runs), data_dir=data_dir or Path(data)
    )
