"""Configuration of rounds: how clients are sampled, stragglers, and simulated devices."""

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Final, Literal

from pydantic import Field

from fedlearn.algorithms.availability_sampling import F3astSampler
from fedlearn.algorithms.bounds import GENEROUS, UpdateBounds
from fedlearn.algorithms.informed_sampling import Sampler
from fedlearn.algorithms.oort import OortSampler
from fedlearn.algorithms.power_of_choice import PowerOfChoiceSampler
from fedlearn.algorithms.sampling import (
    CyclicSampler,
    DescribedSampler,
    PoissonSampler,
    UniformSampler,
)
from fedlearn.algorithms.size_sampling import SizeSampler
from fedlearn.algorithms.stragglers import BelowMinimum, StragglerPolicy
from fedlearn.algorithms.stratified_sampling import StrataAllocation, StratifiedSampler
from fedlearn.config.components import DeclaredSection, build_component, kind, kinds, with_keys_of
from fedlearn.config.own_functions import (
    OwnFunctionSection,
    bind_own_function,
    require_attributes,
)
from fedlearn.config.section import Args, Factory, PathText, Section
from fedlearn.core.ranges import Count, Positive
from fedlearn.simulation import behavior, sources
from fedlearn.simulation.population import Population

#: Defaults that replace those below if the data are not the default job's digits. Stragglers and
#: dropouts are then simulated only on request.
OTHER_DATA: Final[Mapping[str, Mapping[str, Any]]] = {
    "cohort": {"num_wanted": "auto"},
    "stragglers": {"over_selection": 1.0, "deadline_s": "auto"},
    "devices": {"kind": "ideal"},
}

#: What "auto" stands for: the reports that close a round, if there are enough clients, and the
#: deadline of a deployed coordinator, which needs one because real clients vanish without notice.
USUAL_WANTED, REAL_DEADLINE_S = 10, 600.0


class CohortSection(DeclaredSection):
    """Which clients a round asks to train, and how many."""

    sampling: str = Field(description="How clients are drawn.")

    @classmethod
    def find_described_sampler(cls) -> type[DescribedSampler] | None:
        """Return the class of the sampler, if it says what it draws and needs."""
        make = cls.make
        return make if isinstance(make, type) and issubclass(make, DescribedSampler) else None

    num_wanted: Count | Literal["auto"] = Field(
        USUAL_WANTED,
        description=f'Reports that close a round, >= 1; "auto": {USUAL_WANTED}, or in a simulation '
        "of fewer clients as many as can be asked.",
    )


class PythonCohortSection(CohortSection):
    """Your own sampler; its file may be given as the way of sampling itself."""

    factory: Factory = Field(
        description='The sampler: "module:Class" or "path/to/file.py:Class", called with args.'
    )
    args: Args = Field({}, description="Keyword arguments of the sampler.")

    def build(self, **given: object) -> Sampler:
        """Call the factory and check that it made a sampler."""
        key = "cohort.sampling"
        made = bind_own_function(key, self.factory, self.args)()
        require_attributes(key, self.factory, made, ("sample",), "give it a method sample")
        sampler: Sampler = made
        return sampler


COHORTS = kinds(
    "sampling",
    CohortSection,
    kind("uniform", "A fixed number of clients, uniformly without replacement.", UniformSampler),
    kind(
        "poisson",
        "Each client independently with rate ``cohort_size / len(available)``, capped.",
        PoissonSampler,
        cap=2.0,
    ),
    kind(
        "cyclic",
        "All clients in turn: each is in one of ``len(available) // cohort_size`` groups.",
        CyclicSampler,
    ),
    kind("by_size", "By data size: in proportion to the number of examples.", SizeSampler),
    kind(
        "power_of_choice",
        "Power-of-choice: of random candidates those with the highest loss.",
        PowerOfChoiceSampler,
        candidates_per_client=2.0,
    ),
    kind(
        "oort",
        "Oort: clients of high loss that are fast enough, and new ones.",
        OortSampler,
        exploration=0.9,
        exploration_decay=0.98,
        least_exploration=0.2,
        pace=0.3,
        pacer_step=0.05,
        pacer_window=20,
        straggler_penalty=2.0,
        cutoff=0.95,
    ),
    kind(
        "f3ast",
        "F3AST: those of the available clients that have taken part least often.",
        F3astSampler,
        smoothing=0.05,
    ),
    kind(
        "stratified",
        "Stratified: each group of clients has its share of every cohort.",
        StratifiedSampler,
        allocation=StrataAllocation.PROPORTIONAL,
    ),
    kind(
        "python",
        "Your own sampler; its file may be given as the way of sampling itself.",
        PythonCohortSection,
    ),
)


@with_keys_of(
    StragglerPolicy,
    given=("num_wanted",),
    over_selection=1.3,
    below_minimum=BelowMinimum.RETRY,
    max_retries=3,
)
class StragglersSection(Section):
    """When a round closes, and what happens when too few have reported by then."""

    deadline_s: Positive | Literal["none", "auto"] = Field(
        10.0,
        description="Seconds (virtual in a simulation) from the broadcast to the cut-off, > 0; "
        f'"none" waits for every client; "auto": "none" in a simulation, {REAL_DEADLINE_S} in a '
        "deployment.",
    )
    min_reports: Count | Literal["half"] = Field(
        "half",
        description="Fewest reports that make a round, 1 to cohort.num_wanted; "
        '"half" is half of cohort.num_wanted, rounded up.',
    )


@with_keys_of(UpdateBounds, max_norm=GENEROUS.max_norm, max_examples=GENEROUS.max_examples)
class UpdatesSection(Section):
    """Bounds on an unmasked update: one that exceeds them is refused, and its client fails.

    The defaults reject broken updates only; honest ones stay far below. The bounds do not apply
    under secure aggregation or privacy, which clip updates instead.
    """


class BandwidthSection(DeclaredSection):
    """How fast devices communicate."""

    kind: str = Field(description="How bandwidths are modeled.")

    def build_bandwidth(self, data_dir: Path) -> behavior.Bandwidth:
        """Build the model of the devices' bandwidths."""
        made: behavior.Bandwidth = self.build()
        return made


class TracesBandwidthSection(BandwidthSection):
    """Recorded bandwidths, one trace a client."""

    path: PathText | None = Field(
        None, description="The npz file; without it, bandwidth_traces.npz in the data directory."
    )

    def build_bandwidth(self, data_dir: Path) -> behavior.Bandwidth:
        """Load the recorded bandwidths; raises DataError if they are missing or damaged."""
        return sources.bandwidth_traces(Path(self.path or data_dir / "bandwidth_traces.npz"))


BANDWIDTHS = kinds(
    "kind",
    BandwidthSection,
    kind(
        "lognormal",
        "Bandwidths that are log-normal over the population, fixed over the run.",
        behavior.LognormalBandwidth,
        median_mbit_per_s=5.0,
        sigma=1.0,
    ),
    kind("traces", "Recorded bandwidths, one trace a client.", TracesBandwidthSection),
)


class DevicesSection(DeclaredSection):
    """The simulated devices."""

    kind: str = Field(description="What the simulated devices do.")

    def build_behavior(self, population: Population, *, data_dir: Path) -> behavior.ClientBehavior:
        """Build the simulated behavior of the devices of ``population``."""
        made: behavior.ClientBehavior = self.build()
        return made


class LognormalDevicesSection(DevicesSection):
    """Devices whose speeds differ, and which sometimes fail."""

    bandwidth: Annotated[BandwidthSection, BANDWIDTHS] = BANDWIDTHS.of("lognormal")

    def build_behavior(self, population: Population, *, data_dir: Path) -> behavior.ClientBehavior:
        """Build their behavior; raises DataError if bandwidth traces are missing or damaged."""
        return build_component(
            behavior.Behavior, self, bandwidth=self.bandwidth.build_bandwidth(data_dir)
        )


class PythonDevicesSection(OwnFunctionSection, DevicesSection):
    """Devices from a custom function, which is called with the population, then ``args``."""

    def build_behavior(self, population: Population, *, data_dir: Path) -> behavior.ClientBehavior:
        """Call the custom function; raises ConfigError if it does not return a behavior."""
        key, needed = "devices.factory", ("durations_s", "failures")
        made: behavior.ClientBehavior = bind_own_function(
            key, self.factory, self.args, given=(population,)
        )()
        require_attributes(key, self.factory, made, needed, "it must be a ClientBehavior")
        return made


DEVICES = kinds(
    "kind",
    DevicesSection,
    kind("ideal", "Ideal devices: they take no time and never fail.", behavior.Instant),
    kind(
        "lognormal",
        "Devices whose speeds differ, and which sometimes fail.",
        LognormalDevicesSection,
        behavior.Behavior,
        median_ms_per_example=20.0,
        speed_sigma=1.0,
        dropout_rate=0.05,
        round_jitter_sigma=0.1,
    ),
    kind(
        "python",
        "Devices that a function of yours returns, which is given the population, then args.",
        PythonDevicesSection,
    ),
)
