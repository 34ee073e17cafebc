"""Secure aggregation: off, or what its sessions rest on."""

from collections.abc import Iterator
from typing import Literal

from pydantic import Field

from fedlearn.config.section import Count, Problem, Section
from fedlearn.errors import ConfigError
from fedlearn.secagg.graph import Topology
from fedlearn.secagg.parameters import Adversary, Assumptions, Parameters, derive
from fedlearn.secagg.plan import SecurePlan


class SecureAggregationSection(Section):
    """Whether the coordinator learns the sum of the updates alone, and under which assumptions."""

    mode: Literal["off", "complete", "sparse"] = Field(
        "off",
        description='"off": the coordinator reads each update. "complete": it learns their sum '
        'alone; every two clients share a mask. "sparse": likewise, for more than about a hundred '
        "clients: a client shares masks with some.",
    )
    adversary: Literal["active", "honest-but-curious"] = Field(
        "active",
        description='Whom it holds against: "active" is a coordinator that lies, '
        '"honest-but-curious" one that keeps to the protocol and keeps what it is sent.',
    )
    clip_norm: float = Field(
        10.0,
        gt=0,
        description="Largest L2 norm of a client's update; clients scale theirs down to it, > 0.",
    )
    statistics_norm: float = Field(
        100.0,
        gt=0,
        description="Likewise of the change in statistics, such as those of batch "
        "normalisation, > 0.",
    )
    max_examples: Count = Field(
        10_000,
        le=10**9,
        description="A client with more examples counts as one with so many, >= 1; smaller is "
        "more precise.",
    )
    max_loss: float = Field(
        100.0, gt=0, description="A client's training loss is cut off here, > 0."
    )
    modulus_bits: int = Field(
        32,
        ge=16,
        le=40,
        multiple_of=8,
        description="Bits of one number on its way to the coordinator: 16, 24, 32 or 40; what the "
        "sum does not need is precision.",
    )
    corruption: float = Field(
        0.1,
        ge=0,
        lt=1,
        description="Largest fraction of the clients asked that the adversary controls, [0, 1).",
    )
    dropout: float = Field(
        0.3,
        ge=0,
        lt=1,
        description="Largest fraction of the clients asked that drop out, those that "
        "stragglers.over_selection asks too many included, [0, 1).",
    )
    sigma_bits: Count = Field(
        40, description='In "sparse" mode privacy fails with at most 2^-sigma_bits, >= 1.'
    )
    eta_bits: Count = Field(
        30, description='In "sparse" mode a round fails with at most 2^-eta_bits, >= 1.'
    )
    stage_deadline_s: float = Field(
        60.0, gt=0, description="Seconds that each stage without training waits for clients, > 0."
    )
    simulate_as: Literal["protocol", "modular_sum"] = Field(
        "protocol",
        description='In a simulation: "protocol" runs it, with engine.transport "memory"; '
        '"modular_sum" rounds as it does, for large cohorts, without its masks.',
    )

    @property
    def is_on(self) -> bool:
        """Whether updates are summed under masks."""
        return self.mode != "off"

    def parameters(self, num_clients: int) -> Parameters:
        """Return k, t and the rest for so many clients asked.

        Raises:
            ConfigError: Nothing satisfies the assumptions.
        """
        active = self.adversary == "active"
        assumptions = Assumptions(
            adversary=Adversary.ACTIVE_SERVER if active else Adversary.HONEST_BUT_CURIOUS,
            topology=Topology.SPARSE if self.mode == "sparse" else Topology.COMPLETE,
            corruption=self.corruption,
            dropout=self.dropout,
            sigma_bits=self.sigma_bits,
            eta_bits=self.eta_bits,
        )
        return derive(num_clients, assumptions=assumptions)

    def plan(self, num_clients: int, *, min_reports: int, by_examples: bool) -> SecurePlan:
        """Return what the sessions of a run ask.

        Args:
            num_clients: Asked in a round.
            min_reports: Fewest reports that make a round.
            by_examples: Whether the algorithm weighs clients by their examples.

        Raises:
            ConfigError: Nothing satisfies the assumptions.
        """
        parameters = self.parameters(num_clients)
        return SecurePlan(
            parameters=parameters,
            min_survivors=max(min_reports, parameters.min_survivors),
            clip_norm=self.clip_norm,
            statistics_norm=self.statistics_norm,
            max_loss=self.max_loss,
            max_examples=self.max_examples,
            by_examples=by_examples,
            modulus_bits=self.modulus_bits,
        )

    def problems_with(
        self, *, num_asked: int, num_wanted: int, min_reports: int | None
    ) -> Iterator[Problem]:
        """Return what cannot hold for such rounds; keys are those of the whole tree.

        Args:
            num_asked: Clients asked in a round.
            num_wanted: Reports that close it.
            min_reports: Fewest that make one; ``None``: as many as secure aggregation needs.
        """
        mode = "secure_aggregation.mode"
        try:
            parameters = self.parameters(num_asked)
        except ConfigError as error:
            yield Problem((mode, "cohort.num_wanted"), f"cannot hold: {error}")
            return
        least = parameters.min_survivors
        if num_wanted < least:
            text = (
                f"is {self.dropout}, so of {num_asked} clients asked at least {least} must be in "
                f"the sum, but a round closes with {num_wanted}; raise it, or lower "
                "stragglers.over_selection"
            )
            keys = ("secure_aggregation.dropout", "stragglers.over_selection", "cohort.num_wanted")
            yield Problem(keys, text)
        if min_reports is not None and min_reports < least:
            text = (
                f"is {min_reports}, but secure aggregation releases no sum of fewer than {least} "
                f"of {num_asked} clients (threshold {parameters.threshold}); give at least "
                f'{least} or "half", or assume more secure_aggregation.dropout'
            )
            yield Problem(("stragglers.min_reports", mode), text)
