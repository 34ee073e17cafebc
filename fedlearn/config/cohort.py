"""Who trains a round: cohort, stragglers, simulated devices."""

from typing import Annotated, Literal, TypeAlias

from pydantic import Field

from fedlearn.algorithms.stragglers import BelowMinimum
from fedlearn.config.section import Count, PathText, Section


class UniformCohort(Section):
    """A fixed number of clients, uniformly without replacement."""

    sampling: Literal["uniform"] = Field("uniform", description="How clients are drawn.")
    num_wanted: int = Field(10, ge=1, description="Reports that close a round, >= 1.")


class PoissonCohort(Section):
    """Each client independently with the same probability: cohorts of varying size."""

    sampling: Literal["poisson"] = Field("poisson", description="How clients are drawn.")
    num_wanted: int = Field(10, ge=1, description="Reports that close a round, >= 1.")
    cap: float = Field(
        2.0, gt=1, description="Largest cohort as a multiple of the expected one, > 1."
    )


Cohort: TypeAlias = Annotated[UniformCohort | PoissonCohort, Field(discriminator="sampling")]


class StragglersSection(Section):
    """When a round closes, and what happens when too few have reported by then."""

    over_selection: float = Field(
        1.3, ge=1, description="Clients asked per report wanted, >= 1; rounded up to whole clients."
    )
    deadline_s: Annotated[float, Field(gt=0)] | Literal["none"] = Field(
        10.0,
        description="Seconds (virtual in a simulation) from the broadcast to the cut-off, > 0; "
        '"none" waits for every client.',
    )
    min_reports: Count | Literal["half"] = Field(
        "half",
        description="Fewest reports that make a round, 1 to cohort.num_wanted; "
        '"half" is half of cohort.num_wanted, rounded up.',
    )
    below_minimum: Annotated[BelowMinimum, Field(strict=False)] = Field(
        BelowMinimum.RETRY,
        description="What a round below its minimum does: ask a fresh cohort, leave the model "
        "as it is, or fail the run.",
    )
    max_retries: int = Field(
        3, ge=0, description="Attempts of a round after its first, >= 0; then the run fails."
    )


class LognormalBandwidth(Section):
    """Bandwidths that are log-normal over the population."""

    kind: Literal["lognormal"] = Field("lognormal", description="How bandwidths are modelled.")
    median_mbit_per_s: float = Field(
        5.0, gt=0, description="Median bandwidth of the devices, 10**6 bits a second, > 0."
    )
    sigma: float = Field(
        1.0, ge=0, description="Standard deviation of its logarithm, >= 0; 0: all alike."
    )


class TracesBandwidth(Section):
    """Recorded bandwidths, one trace a client."""

    kind: Literal["traces"] = Field("traces", description="How bandwidths are modelled.")
    path: PathText | None = Field(
        None, description="The npz file; without it, bandwidth_traces.npz in the data directory."
    )


Bandwidth: TypeAlias = Annotated[LognormalBandwidth | TracesBandwidth, Field(discriminator="kind")]


class IdealDevices(Section):
    """Devices that answer at once and never fail."""

    kind: Literal["ideal"] = Field("ideal", description="What the simulated devices do.")


class LognormalDevices(Section):
    """Devices whose speeds differ, and which sometimes fail."""

    kind: Literal["lognormal"] = Field("lognormal", description="What the simulated devices do.")
    median_ms_per_example: float = Field(
        20.0,
        gt=0,
        description="Median milliseconds of one example's forward pass, > 0; "
        "a training step costs three of them.",
    )
    speed_sigma: float = Field(
        1.0, ge=0, description="Standard deviation of its logarithm, >= 0; 0: all alike."
    )
    round_jitter_sigma: float = Field(
        0.1,
        ge=0,
        description="Standard deviation of the logarithm of a factor on a client's compute time "
        "that is drawn anew every round, >= 0.",
    )
    dropout_rate: float = Field(
        0.05, ge=0, le=1, description="Probability that a client fails in a round, [0, 1]."
    )
    bandwidth: Bandwidth = Field(LognormalBandwidth(), description="How fast devices communicate.")


Devices: TypeAlias = Annotated[IdealDevices | LognormalDevices, Field(discriminator="kind")]
