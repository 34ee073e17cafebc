"""What privacy ledgers have spent, by run, as pages show it."""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from fedlearn.dashboard.rendering import PAGE_SIZE, Dashboard
from fedlearn.errors import UnknownRun
from fedlearn.store.ledger import LedgerLine, list_ledgers
from fedlearn.store.paging import Page
from fedlearn.store.run_totals import read_latest
from fedlearn.store.study_list import StudyLine, read_studies

#: Most runs of a ledger that a page lists.
_MOST_RUNS = 10


class Charged(NamedTuple):
    """What a run has charged.

    Attributes:
        exists: Whether the run is still recorded.
        budget: The ε that it may not exceed; ``None`` if it has no such limit.
        epsilon: ε of the whole ledger after its last round; ``None`` if it computes none.
    """

    line: LedgerLine
    exists: bool = False
    budget: float | None = None
    epsilon: float | None = None


class LedgerView(NamedTuple):
    """A ledger: what its runs have charged, and the study that it belongs to, if any.

    Attributes:
        data_set: Name of the study's data set; empty without a study.
        runs: The runs that charged it last.
        num_more: How many other runs have charged it.
    """

    name: str
    study: StudyLine | None
    data_set: str
    runs: Sequence[Charged]
    num_more: int

    @property
    def epsilon(self) -> float | None:
        """ε of the ledger, as the run that charged last has computed it."""
        return next((each.epsilon for each in self.runs if each.epsilon is not None), None)


def read_ledgers(dashboard: Dashboard, *, page: int, study: str = "") -> Page[LedgerView]:
    """Return a page of the ledgers, by name; with ``study``, of those of its data sets.

    Raises:
        StoreError: The database cannot be read.
    """
    prefix = f"{study}/" if study else ""
    found = list_ledgers(dashboard.database, prefix=prefix, page=page, size=PAGE_SIZE)
    names = [lines[0].population.partition("/") for lines in found.rows]
    studies = read_studies(dashboard.database, [name for name, _, _ in names])
    ledgers = [
        LedgerView(
            name=lines[0].population,
            study=studies.get(name),
            data_set=data_set,
            runs=[_read_run(dashboard, line) for line in lines[:_MOST_RUNS]],
            num_more=max(0, len(lines) - _MOST_RUNS),
        )
        for (name, _, data_set), lines in zip(names, found.rows, strict=True)
    ]
    return Page(rows=ledgers, number=found.number, size=found.size, total=found.total)


def _read_run(dashboard: Dashboard, line: LedgerLine) -> Charged:
    try:
        record = dashboard.database.run(line.run).record
    except UnknownRun:
        return Charged(line)
    privacy = record.config.get("privacy")
    budget = privacy.get("epsilon") if isinstance(privacy, Mapping) else None
    spent = read_latest(dashboard.database, line.run).get("epsilon")
    return Charged(
        line,
        exists=True,
        budget=float(budget) if isinstance(budget, int | float) else None,
        epsilon=None if spent is None else spent.value,
    )
