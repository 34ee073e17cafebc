"""Configuration of secure aggregation: whether it is on, and what its sessions assume."""

from collections.abc import Iterator, Sequence
from typing import Annotated, Literal

from annotated_types import Ge
from pydantic import Field

from fedlearn.algorithms.compression import Compressor
from fedlearn.algorithms.lanes import LaneSpec
from fedlearn.config.components import build_component, with_keys_of
from fedlearn.config.privacy import PrivacySection
from fedlearn.config.section import PathText, Problem, Section
from fedlearn.core.ranges import BelowOne, Positive
from fedlearn.errors import ConfigError
from fedlearn.secagg.evaluation import EvaluationPlan
from fedlearn.secagg.graph import Topology
from fedlearn.secagg.parameters import Adversary, Assumptions, Parameters, derive
from fedlearn.secagg.plan import SecurePlan

#: In a sparse graph, a round fails with probability at most 2^-30.
_ETA_BITS = 30


@with_keys_of(
    Assumptions,
    SecurePlan,
    given=(
        "topology",
        "eta_bits",
        "parameters",
        "min_survivors",
        "by_examples",
        "further",
        "has_model",
        "compressor",
        "noise_multiplier",
    ),
    corruption=0.1,
    sigma_bits=40,
    statistics_norm=100.0,
    max_loss=100.0,
    max_examples=10_000,
    modulus_bits=32,
)
class SecureAggregationSection(Section):
    """Whether the coordinator learns only the sum of the updates, and under which assumptions."""

    mode: Literal["off", "complete", "sparse"] = Field(
        "off",
        description='"off": the coordinator reads each update. "complete": it learns only their '
        'sum; every two clients share a mask. "sparse": the same for more than about '
        "a hundred clients: each shares masks with some others.",
    )
    adversary: Literal["active", "honest-but-curious"] = Field(
        "active",
        description='Adversary that it protects against: "active" is a coordinator that lies, '
        '"honest-but-curious" one that follows the protocol and stores what it '
        "receives.",
    )
    dropout: BelowOne = Field(
        0.3,
        description="Largest fraction of the clients asked that drop out, including those that "
        "stragglers.over_selection asks in excess, [0, 1).",
    )
    clip_norm: Positive = Field(
        10.0,
        description="Largest L2 norm of a client's update; clients scale theirs down to it, > 0. "
        'With privacy.mode = "distributed", privacy.clip_norm replaces it.',
    )
    stage_deadline_s: Positive = Field(
        60.0, description="Seconds that each stage without training waits for clients, > 0."
    )
    roster: PathText | Literal[""] = Field(
        "",
        description="The file of `fedlearn roster` that clients received, if there is one. If "
        'secure_aggregation.adversary is "active", each round asks the clients that '
        "are drawn from it, and clients take part in no other rounds. Ignored in a "
        "simulation.",
    )
    draw_factor: Annotated[float, Ge(1)] = Field(
        2.0,
        description="With a roster: clients drawn from it for each client asked, >= 1, because "
        "not all are connected. Clients allow 2 unless their policy says otherwise.",
    )
    simulate_as: Literal["protocol", "modular_sum"] = Field(
        "protocol",
        description='In a simulation: "protocol" runs the protocol, with engine.transport '
        '"memory"; "modular_sum" computes the same rounded sum without masks, for '
        "large cohorts.",
    )

    @property
    def is_on(self) -> bool:
        """Whether updates are summed under masks."""
        return self.mode != "off"

    def problems(self) -> Iterator[Problem]:
        """Refuse a roster that would have no effect."""
        if self.roster and not self.draws:
            text = (
                f'is "{self.roster}", but no clients are drawn if secure aggregation is off, or '
                "it does not protect against an active coordinator; set secure_aggregation.mode to "
                '"complete" or "sparse" and secure_aggregation.adversary to "active", or leave the '
                "roster out"
            )
            yield Problem(("roster", "mode", "adversary"), text)

    @property
    def draws(self) -> bool:
        """Whether the clients of a round are drawn from a roster."""
        return bool(self.is_on and self.roster and self.adversary == "active")

    def parameters(self, num_clients: int) -> Parameters:
        """Derive k, t and the other parameters for a round that asks ``num_clients``.

        Raises:
            ConfigError: No parameters satisfy the assumptions.
        """
        active = self.adversary == "active"
        assumptions = build_component(
            Assumptions,
            self,
            adversary=Adversary.ACTIVE_SERVER if active else Adversary.HONEST_BUT_CURIOUS,
            topology=Topology.SPARSE if self.mode == "sparse" else Topology.COMPLETE,
            eta_bits=_ETA_BITS,
        )
        return derive(num_clients, assumptions=assumptions)

    def plan(
        self,
        num_clients: int,
        *,
        min_reports: int,
        by_examples: bool,
        further: Sequence[LaneSpec],
        compressor: Compressor | None,
        privacy: PrivacySection,
        has_model: bool,
    ) -> SecurePlan:
        """Build the plan of a run's sessions, for rounds that ask ``num_clients``.

        With distributed ``privacy``, clients clip and add noise as that table says.

        Raises:
            ConfigError: Nothing satisfies the assumptions, or a lane has no bound.
        """
        parameters = self.parameters(num_clients)
        names = ("clip_norm", "noise_multiplier") if privacy.is_distributed else ()
        noise = {name: getattr(privacy, name) for name in names}
        return build_component(
            SecurePlan,
            self,
            parameters=parameters,
            min_survivors=max(min_reports, parameters.min_survivors),
            by_examples=by_examples,
            further=tuple(further),
            has_model=has_model,
            compressor=compressor,
            hides_examples=privacy.is_distributed and privacy.hides_examples,
            **noise,
        )

    def evaluation_plan(self, num_clients: int, *, measures: Sequence[str]) -> EvaluationPlan:
        """Build the plan of an evaluation by ``num_clients`` under masks.

        Raises:
            ConfigError: No parameters satisfy the assumptions.
        """
        parameters = self.parameters(num_clients)
        return build_component(EvaluationPlan, self, parameters=parameters, measures=measures)

    def problems_with(
        self, *, cohort_size: int, num_wanted: int, min_reports: int | None
    ) -> Iterator[Problem]:
        """Yield the conflicts with rounds of this size; keys are those of the whole tree.

        Args:
            cohort_size: Clients asked in a round.
            num_wanted: Reports that close it.
            min_reports: Fewest reports that make one; ``None`` for as many as secure aggregation
                needs.
        """
        mode = "secure_aggregation.mode"
        try:
            parameters = self.parameters(cohort_size)
        except ConfigError as error:
            yield Problem((mode, "cohort.num_wanted"), f"cannot hold: {error}")
            return
        least = parameters.min_survivors
        if num_wanted < least:
            text = (
                f"is {self.dropout}, so of {cohort_size} clients asked at least {least} must be in "
                f"the sum, but a round closes with {num_wanted}; raise it, or lower "
                "stragglers.over_selection"
            )
            keys = ("secure_aggregation.dropout", "stragglers.over_selection", "cohort.num_wanted")
            yield Problem(keys, text)
        if min_reports is not None and min_reports < least:
            text = (
                f"is {min_reports}, but secure aggregation releases no sum of fewer than {least} "
                f"of {cohort_size} clients (threshold {parameters.threshold}); give at least "
                f'{least} or "half", or assume more secure_aggregation.dropout'
            )
            yield Problem(("stragglers.min_reports", mode), text)
