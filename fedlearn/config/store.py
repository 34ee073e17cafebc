"""Configuration of the store: where a run is recorded, and which checkpoints are kept."""

from collections.abc import Iterator
from typing import Annotated

from pydantic import Field

from fedlearn.config.components import with_keys_of
from fedlearn.config.section import PathText, Problem, Section
from fedlearn.config.tables import Use
from fedlearn.core.ranges import NotNegative
from fedlearn.core.redaction import remove_password
from fedlearn.store.retention import DEFAULT_RETENTION, Retention


@with_keys_of(
    Retention,
    keep_last=DEFAULT_RETENTION.keep_last,
    keep_every=DEFAULT_RETENTION.keep_every,
    keep_best=DEFAULT_RETENTION.keep_best,
)
class StoreSection(Section):
    """Where the run is recorded, and which checkpoints are kept."""

    url: str | None = Field(
        None,
        description="Database as an SQLAlchemy URL without a password; without it, "
        "FEDLEARN_STORE_URL, else SQLite in the runs directory.",
    )
    runs_dir: PathText | None = Field(
        None, description='Directory of the runs; without it, FEDLEARN_RUNS_DIR, else "runs".'
    )
    checkpoint_every_s: Annotated[NotNegative, Use.SIMULATED] = Field(
        5.0,
        description="Seconds from one checkpoint of a simulation to the next, >= 0; 0: after "
        "every round, as a deployment always does.",
    )

    def problems(self) -> Iterator[Problem]:
        """Refuse a password: the tree is stored with the run, printed and hashed."""
        if self.url is not None and remove_password(self.url) != self.url:
            text = "has a password, which would be stored with the run; "
            yield Problem(("url",), f"{text}give the whole URL in FEDLEARN_STORE_URL instead")
