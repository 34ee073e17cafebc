"""Configuration of the weights of stale updates, which were trained from an older model."""

from collections.abc import Iterable
from functools import partial

from fedlearn.algorithms.staleness import Staleness, StalenessWeight
from fedlearn.config.components import build_component, find_problem, with_keys_of
from fedlearn.config.section import Problem, Section


@with_keys_of(
    Staleness,
    max_staleness=20,
    staleness_weight=StalenessWeight.POLYNOMIAL,
    staleness_exponent=0.5,
    staleness_hinge=4,
)
class StalenessSection(Section):
    """The table ``staleness``."""

    def problems(self) -> Iterable[Problem]:
        """Refuse an exponent that gives the stalest updates almost no weight."""
        return find_problem(partial(build_component, Staleness, self))
