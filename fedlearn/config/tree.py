"""The whole configuration tree of a run, and the checks across its tables."""

import hashlib
import json
import math
from collections.abc import Callable, Iterator
from typing import Annotated, Any, Literal

from pydantic import Field, model_validator

from fedlearn.algorithms.asynchronous import Asynchrony
from fedlearn.algorithms.sampling import DRAWN_AS_OTHERS_LAND, SeededSampler, why_not_secure
from fedlearn.algorithms.stragglers import StragglerPolicy
from fedlearn.config.aggregation import AGGREGATIONS, AggregationSection
from fedlearn.config.asynchronous import AsynchronousSection, imply_buffers
from fedlearn.config.attack import ATTACKS, AttackSection
from fedlearn.config.cohort import (
    COHORTS,
    DEVICES,
    OTHER_DATA,
    REAL_DEADLINE_S,
    USUAL_WANTED,
    CohortSection,
    DevicesSection,
    StragglersSection,
    UpdatesSection,
)
from fedlearn.config.components import build_component, find_problem
from fedlearn.config.compression import (
    COMPRESSIONS,
    DOWNLOAD_COMPRESSIONS,
    CompressionSection,
    DownloadCompressionSection,
)
from fedlearn.config.coordinator import CoordinatorSection
from fedlearn.config.data import DATA, DataSection, NoDataSection
from fedlearn.config.earlier import read_earlier
from fedlearn.config.flower import ROUND, FlowerSection, is_foreign
from fedlearn.config.late_updates import LateUpdatesSection
from fedlearn.config.own_functions import (
    OwnFunctionSection,
    bind_own_function,
    require_attributes,
)
from fedlearn.config.privacy import PrivacySection
from fedlearn.config.problems import Sources, validate
from fedlearn.config.section import Fraction, Problem, RunName, Section
from fedlearn.config.secure_aggregation import SecureAggregationSection
from fedlearn.config.staleness import StalenessSection
from fedlearn.config.store import StoreSection
from fedlearn.config.tables import Use
from fedlearn.config.telemetry import TelemetrySection
from fedlearn.config.toml import quote
from fedlearn.config.trackers import TrackersSection
from fedlearn.config.training import (
    ALGORITHMS,
    CLIENTS,
    LOSSES,
    MODELS,
    AlgorithmSection,
    ClientSection,
    LossSection,
    MetricSection,
    ModelSection,
)
from fedlearn.core.ranges import Count, NotNegative, Positive, Whole
from fedlearn.errors import ConfigError
from fedlearn.rounds.run import RoundCallback

_MAX_SEED = 2**63 - 1
#: Keys of ``client`` that do not describe its training, and those that FedSGD leaves open.
_NOT_TRAINING = ClientSection.model_fields.keys() - {"optimizer", "epochs", "batch_size"}
_FREE_UNDER_FEDSGD = _NOT_TRAINING | {"learning_rate", "shuffle"}
_MAX_ROUNDS = 1_000_000_000
#: Ways of sampling that ask clients with more examples more often.
_COUNTING_EXAMPLES = frozenset(
    each.model_fields["sampling"].default
    for each in COHORTS.members
    if (sampler := each.find_described_sampler()) is not None and sampler.counts_examples
)
_USUAL_EVALUATED = 50
#: Why a query refuses a key, if not because there is no model.
_WITHOUT_MODEL = {
    "privacy.mode": "this mode adds noise to models; a query takes central or distributed, with "
    'privacy.unit = "example" to hide single examples',
    "privacy.clip_quantile": "the bounds of a query are fixed",
    "privacy.bands": "rounds of a query do not add up to a model, in which noise would cancel",
    "secure_aggregation.clip_norm": "the sums of a query have bounds of their own",
    "secure_aggregation.statistics_norm": "the sums of a query have bounds of their own",
    "late_updates.mode": "an answer belongs to the question of its round",
    "asynchronous.mode": "an answer belongs to the question of its round",
    "attack.kind": "attacks change models",
    "client.trainer": "a query says what a client computes",
    "client.bundle": "a query is answered by fedlearn's own code",
    "client.extra": "a query has fields instead",
    "client.by_round": "a query broadcasts what changes from round to round",
    "engine.device": "a query is computed on the CPU",
    "flower.client_apps": "ClientApps written without fedlearn know no queries",
}


class EvaluationSection(Section):
    """When and on what the global model is evaluated."""

    every_rounds: Whole = Field(
        1, description="Rounds from one evaluation to the next; 0: only at the end."
    )
    clients: Whole | Literal["auto"] = Field(
        "auto",
        description="Clients evaluated for the quantiles over clients, at most the population; "
        f'0: none; "auto": {_USUAL_EVALUATED}, in a simulation of your own data no more than '
        "cohort.num_wanted. Simulated, they are the same clients every time. Deployed with secure "
        "aggregation their metrics are summed securely, which reveals only the mean.",
    )
    client_test_fraction: Annotated[Fraction | None, Use.SIMULATED] = Field(
        None,
        description="Share of each simulated client's examples that it does not train on and is "
        "evaluated on, (0, 1); without it, clients are evaluated on all their examples, unless the "
        "data have tests of their own.",
    )
    fine_tune_epochs: Whole = Field(
        0,
        description="Epochs for which each evaluated client first trains a copy of its model, "
        "measured as its personal model; 0: none.",
    )
    fine_tune_learning_rate: Positive | None = Field(
        None,
        description="Step size of the fine-tuning, > 0; without it, that of [client], before any "
        "schedule.",
    )
    batch_size: Count = Field(1024, description="Examples evaluated at a time, >= 1.")
    deadline_s: Positive = Field(
        60.0,
        description="Seconds that a deployed coordinator waits for the clients that evaluate, > 0.",
    )

    @property
    def num_clients(self) -> int:
        """Number of clients that evaluate; needs a resolved tree."""
        assert self.clients != "auto"
        return self.clients


class EarlyStoppingSection(Section):
    """When a run ends before its last round."""

    metric: Annotated[str, Field(min_length=1)] = Field(
        "auto",
        description='The metric that is watched, and that makes a model the best: "accuracy", '
        '"loss", the name of one of yours, or of its spread over clients as '
        '"clients/loss_worst_decile"; "auto" is accuracy where the loss measures it, else loss.',
    )
    patience_rounds: Count | None = Field(
        None, description="Rounds without improvement that end the run, >= 1; without it: never."
    )
    min_improvement: NotNegative = Field(
        0.0, description="Smallest change for the better that counts, >= 0."
    )
    target: float | None = Field(
        None, description="Value of the metric that ends the run; without it: none."
    )

    def problems(self) -> Iterator[Problem]:
        """Refuse a target that cannot be reached, and keys without effect."""
        if self.metric == "accuracy" and self.target is not None and self.target > 1.0:
            text = f"is {self.target}, but an accuracy is at most 1; give a fraction such as 0.95"
            yield Problem(("target", "metric"), text)
        if self.min_improvement > 0.0 and self.patience_rounds is None:
            text = f"is {self.min_improvement} without effect; set early_stopping.patience_rounds"
            yield Problem(("min_improvement",), text)


class EngineSection(Section):
    """Where and how local training is computed."""

    transport: Annotated[Literal["engine", "memory"], Use.SIMULATED] = Field(
        "engine",
        description='"engine" trains blocks of clients at once; "memory" runs real client '
        "sessions through the wire codec.",
    )
    executor: Annotated[
        Literal["auto", "sequential", "vmap", "compiled", "fused"], Use.SIMULATED
    ] = Field(
        "auto", description='How a block of clients is trained; "auto" measures and says why.'
    )
    num_workers: Annotated[Count | Literal["auto"], Use.SIMULATED] = Field(
        "auto", description='Processes that train clients, >= 1, or "auto".'
    )
    block_size: Annotated[Count | Literal["auto"], Use.SIMULATED] = Field(
        "auto", description='Clients trained in one tensor operation, >= 1, or "auto".'
    )
    slab_bytes: Whole = Field(
        0,
        description='Memory for replies that are aggregated together, with transport "memory" and '
        "in a deployment; 0 folds each in as it arrives, which equals the engine bit for bit.",
    )
    device: Annotated[Literal["auto", "cpu", "cuda"], Use.SIMULATED] = Field(
        "auto", description='Where tensors live; "auto" takes a GPU where there is one.'
    )
    precision: Annotated[Literal["float32", "bfloat16"], Use.SIMULATED] = Field(
        "float32", description="Arithmetic of forward and backward passes."
    )

    def problems(self) -> Iterator[Problem]:
        """Refuse engine options that real client sessions cannot honor."""
        sessions = {
            "executor": ("auto", "sequential"),
            "num_workers": ("auto", 1),
            "block_size": ("auto", 1),
        }
        for name, allowed in sessions.items():
            value = getattr(self, name)
            if self.transport == "memory" and value not in allowed:
                options = " or ".join(map(quote, allowed))
                text = f'is {quote(value)}, but engine.transport is "memory"; give {options}'
                yield Problem((name, "transport"), text)


class Config(Section):
    """The configuration of a run; ``Config()`` is what ``fedlearn simulate`` runs by default.

    Example:
        >>> config = Config()
        >>> config.cohort.num_wanted, config.straggler_policy().cohort_size
        (10, 13)
    """

    name: RunName | None = Field(
        None,
        description="Name of the run; without it, a simulation gets a random name, and a deployed "
        'run is called "federation".',
    )
    seed: int = Field(
        0, ge=0, le=_MAX_SEED, description="Seed of all that is random, 0 to 2**63 - 1."
    )
    num_rounds: int = Field(20, ge=1, le=_MAX_ROUNDS, description="Rounds of the run, >= 1.")
    centralized: bool = Field(
        False,
        description="Train the same model on the pooled examples instead: a round is "
        "client.epochs passes over all of them. It gives the baseline for a federated "
        "result. The clients only evaluate.",
    )
    data: Annotated[DataSection, DATA] = DATA.of("digits")
    model: Annotated[ModelSection, MODELS] = MODELS.of("mlp")
    loss: Annotated[LossSection, LOSSES] = LOSSES.of("cross_entropy")
    metrics: dict[str, MetricSection] = Field(
        {}, description="Metrics of the model besides the loss, by name."
    )
    algorithm: Annotated[AlgorithmSection, ALGORITHMS] = ALGORITHMS.of("fedavg")
    aggregation: Annotated[AggregationSection, AGGREGATIONS] = AGGREGATIONS.of("own")
    compression: Annotated[CompressionSection, COMPRESSIONS] = COMPRESSIONS.of("none")
    download_compression: Annotated[DownloadCompressionSection, DOWNLOAD_COMPRESSIONS] = (
        DOWNLOAD_COMPRESSIONS.of("none")
    )
    client: Annotated[ClientSection, CLIENTS] = CLIENTS.of("sgd")
    cohort: Annotated[CohortSection, COHORTS] = COHORTS.of("uniform")
    stragglers: StragglersSection = Field(
        StragglersSection(),
        description="When a round closes, and what happens when too few have reported by then.",
    )
    late_updates: LateUpdatesSection = Field(
        LateUpdatesSection(),
        description="How updates that arrive after their round has closed are used, and whether "
        "deadlines adapt.",
    )
    asynchronous: AsynchronousSection = Field(
        AsynchronousSection(),
        description="Whether clients train at all times, and the server steps whenever a buffer "
        "of updates is full.",
    )
    staleness: StalenessSection = Field(
        StalenessSection(),
        description="Weight of an update that was trained from an older model than the newest, in "
        "asynchronous rounds and if late updates are kept.",
    )
    updates: UpdatesSection = Field(
        UpdatesSection(),
        description="Bounds on an unmasked update: one that exceeds them is refused, and its "
        "client fails.",
    )
    secure_aggregation: SecureAggregationSection = Field(
        SecureAggregationSection(),
        description="Whether the coordinator learns only the sum of the updates, and under which "
        "assumptions.",
    )
    privacy: PrivacySection = Field(
        PrivacySection(),
        description="Whether the released models hide each user's participation, or single "
        "examples, and how well.",
    )
    devices: Annotated[DevicesSection, DEVICES] = DEVICES.of("lognormal")
    attack: Annotated[AttackSection, ATTACKS] = ATTACKS.of("none")
    evaluation: EvaluationSection = Field(
        EvaluationSection(), description="When and on what the global model is evaluated."
    )
    early_stopping: EarlyStoppingSection = Field(
        EarlyStoppingSection(), description="When a run ends before its last round."
    )
    engine: EngineSection = Field(
        EngineSection(), description="Where and how local training is computed."
    )
    callbacks: dict[str, OwnFunctionSection] = Field(
        {},
        description="Callbacks after each round, by a name of your choice: each function returns "
        "an object with after_round(record, model).",
    )
    trackers: TrackersSection = Field(
        TrackersSection(),
        description="Experiment trackers that the run is logged to.",
    )
    telemetry: TelemetrySection = Field(
        TelemetrySection(), description="How the process reports what it does: its log."
    )
    store: StoreSection = Field(StoreSection(), description="Where the record of the run goes.")
    coordinator: CoordinatorSection = Field(
        CoordinatorSection(),
        description="The deployed coordinator; a simulation ignores it, except for the "
        "coordinator's own training.",
    )
    flower: FlowerSection = Field(
        FlowerSection(), description="A run on a Flower federation, by `flwr run`."
    )

    @property
    def has_model(self) -> bool:
        """Whether a model is trained; a query has none."""
        return self.model.kind != "none"

    def round_callbacks(self) -> tuple[RoundCallback, ...]:
        """Build the trackers, and then the callbacks in the order of the file.

        Raises:
            ConfigError: A function cannot be imported or called, or returns something else.
        """
        made = list[RoundCallback](self.trackers.build())
        for name, each in self.callbacks.items():
            key = f"callbacks.{name}.factory"
            callback = bind_own_function(key, each.factory, each.args)()
            remedy = "it must have after_round(record, model)"
            require_attributes(key, each.factory, callback, ("after_round",), remedy)
            made.append(callback)
        return tuple(made)

    @model_validator(mode="before")
    @classmethod
    def _imply_defaults(cls, raw: Any) -> Any:  # Any: not validated yet
        """Add the defaults that some tables imply for unset keys of others.

        - A name with a colon is the location of a custom strategy or sampler.
        - FedSGD implies the local training that defines it.
        - ClientApps written without fedlearn imply ``client.optimizer = "own"``.
        - Data other than the digits imply no stragglers and ideal devices.
        - Sampling by the number of examples implies that updates are weighted equally.
        - Privacy implies a way of sampling cohorts and an unweighted mean; if clients add the noise
          in shares, also secure aggregation.
        - Late updates that are kept imply another bound on staleness and another hinge.
        - FedBuff and FedAsync imply asynchronous rounds, and these a buffer in place of a cohort.
        """
        if not isinstance(raw, dict):
            return raw
        algorithm, client, data = raw.get("algorithm"), raw.get("client", {}), raw.get("data")
        implied = dict[str, Any]()
        name = algorithm.get("name") if isinstance(algorithm, dict) else None
        if isinstance(algorithm, dict) and isinstance(name, str) and ":" in name:
            implied["algorithm"] = {**algorithm, "name": "python", "factory": name}
        implied |= _imply_from_sampling(raw | implied)
        if name == "fedsgd" and isinstance(client, dict):
            implied["client"] = {"epochs": 1, "batch_size": "all"} | client
        flower = raw.get("flower")
        has_foreign_apps = isinstance(flower, dict) and is_foreign(flower.get("client_apps"))
        if has_foreign_apps and isinstance(client, dict):
            implied["client"] = {"optimizer": "own"} | client
        source = data.get("source") if isinstance(data, dict) else getattr(data, "source", None)
        for key, other in OTHER_DATA.items():
            table = (raw | implied).get(key, {})
            if source not in (None, "digits") and isinstance(table, dict):
                implied[key] = {**other, **table}
        privacy = raw.get("privacy")
        if isinstance(privacy, dict) and privacy.get("mode", "off") != "off":
            implied |= _imply_from_privacy(raw | implied)
        late, staleness = raw.get("late_updates"), raw.get("staleness", {})
        if isinstance(late, dict) and late.get("mode") == "keep" and isinstance(staleness, dict):
            implied["staleness"] = {"max_staleness": 5, "staleness_hinge": 0, **staleness}
        # Buffers last: they depend on the tables that the rules above may have changed.
        return raw | implied | imply_buffers(raw | implied)

    def problems(self) -> Iterator[Problem]:
        """Yield the conflicts between sections."""
        yield from self._check_cohort_size()
        yield from self._check_missing_data()
        if not self.has_model:
            yield from self._check_query()
        if self.secure_aggregation.is_on:
            yield from self._check_secure_aggregation()
        if self.privacy.is_on:
            yield from self._check_privacy()
        if self.attack.is_on:
            yield from self._check_attack()
        yield from self._check_update_bounds()
        if self.flower.is_foreign:
            yield from self._check_foreign_apps()
        yield from self._check_asynchrony()
        yield from self._check_sampling()
        if self.algorithm.name == "fedsgd":
            yield from self._check_fedsgd()
        if self.centralized and self.coordinator.training.is_on:
            text = "is true, but the coordinator trains as well (coordinator.training); remove one"
            yield Problem(("centralized",), text)
        yield from self._check_client_evaluation()
        watched = {
            "early_stopping.patience_rounds": self.early_stopping.patience_rounds,
            "early_stopping.target": self.early_stopping.target,
        }
        for key, value in watched.items():
            if value is not None and self.evaluation.every_rounds == 0:
                text = f"is {value}, but only the end is evaluated; raise evaluation.every_rounds"
                yield Problem((key, "evaluation.every_rounds"), text)

    def _check_query(self) -> Iterator[Problem]:
        """Refuse what changes or measures a model, where there is none."""
        privacy, stopping = self.privacy, self.early_stopping
        secure, usual = (
            each.model_dump() for each in (self.secure_aggregation, SecureAggregationSection())
        )
        set_keys = {
            "loss.kind": self.loss != LOSSES.of("cross_entropy"),
            "metrics": bool(self.metrics),
            "algorithm.keep_local": bool(self.algorithm.keep_local),
            "aggregation.rule": self.aggregation.rule != "own",
            "compression.method": self.compression.method != "none",
            "download_compression.method": self.download_compression.method != "none",
            "client.trainer": self.client.trainer is not None,
            "client.bundle": self.client.bundle is not None,
            "client.extra": bool(self.client.extra),
            "client.by_round": self.client.by_round is not None,
            "late_updates.mode": self.late_updates.is_on,
            "asynchronous.mode": self.asynchronous.is_on,
            "privacy.mode": privacy.mode in ("local", "example"),
            "privacy.clip_quantile": privacy.is_on and privacy.clip_quantile is not None,
            "privacy.bands": privacy.is_on and privacy.bands is not None,
            **{
                f"secure_aggregation.{name}": secure[name] != usual[name]
                for name in ("clip_norm", "statistics_norm")
            },
            "attack.kind": self.attack.is_on,
            "evaluation.clients": self.evaluation.clients not in ("auto", 0),
            "evaluation.fine_tune_epochs": bool(self.evaluation.fine_tune_epochs),
            "evaluation.client_test_fraction": self.evaluation.client_test_fraction is not None,
            "early_stopping.metric": stopping.metric != "auto",
            "early_stopping.patience_rounds": stopping.patience_rounds is not None,
            "early_stopping.target": stopping.target is not None,
            "engine.device": self.engine.device == "cuda",
            "coordinator.training": self.coordinator.training.is_on,
            "flower.client_apps": self.flower.is_foreign,
        }
        for key, is_set in set_keys.items():
            if is_set:
                text = f"is set, but {_WITHOUT_MODEL.get(key, 'there is no model')}"
                yield Problem((key, "model.kind"), f'{text} (model.kind is "none"); leave it out')

    def _check_client_evaluation(self) -> Iterator[Problem]:
        """Refuse what says how clients evaluate, where none does."""
        for name in ("fine_tune_epochs", "client_test_fraction"):
            value, key = getattr(self.evaluation, name), f"evaluation.{name}"
            if value and self.evaluation.clients == 0:
                text = f"is {value}, but no client evaluates; raise evaluation.clients"
                yield Problem((key, "evaluation.clients"), text)
        rate, epochs = "evaluation.fine_tune_learning_rate", "evaluation.fine_tune_epochs"
        if self.evaluation.fine_tune_learning_rate and not self.evaluation.fine_tune_epochs:
            text = f"is {self.evaluation.fine_tune_learning_rate}, but no client fine-tunes"
            yield Problem((rate, epochs), f"{text}; set {epochs}, or leave it out")

    def _check_asynchrony(self) -> Iterator[Problem]:
        """Refuse conflicts with asynchronous rounds or late updates, and staleness without both."""
        stragglers = self.stragglers.model_dump()
        values = {
            "algorithm.name": self.algorithm.name,
            "asynchronous.mode": self.asynchronous.mode,
            "centralized": self.centralized,
            "cohort.num_wanted": self.cohort.num_wanted,
            "privacy.mode": self.privacy.mode,
            "secure_aggregation.mode": self.secure_aggregation.mode,
            **{f"stragglers.{name}": value for name, value in stragglers.items()},
        }
        yield from self.asynchronous.problems_with(values)
        yield from self.late_updates.problems_with(values)
        for problem in find_problem(self.asynchrony):  # more clients in flight than can count
            yield problem._replace(keys=(f"asynchronous.{problem.keys[0]}",))
        if not (self.asynchronous.is_on or self.late_updates.is_on):
            for name, info in StalenessSection.model_fields.items():
                if getattr(self.staleness, name) != info.default:
                    text = (
                        "is without effect, since no update is older than the round that takes it; "
                        'set asynchronous.mode to "buffered" or late_updates.mode to "keep"'
                    )
                    yield Problem((f"staleness.{name}", "asynchronous.mode"), text)

    def _check_sampling(self) -> Iterator[Problem]:
        """Refuse a sampler that cannot draw one client after another, where rounds need that."""
        sampler = self.cohort.find_described_sampler()
        modes = {
            "asynchronous.mode": (self.asynchronous.is_on, self.asynchronous.mode),
            "late_updates.mode": (self.late_updates.is_on, self.late_updates.mode),
        }
        for mode, (is_on, value) in modes.items():
            if is_on and sampler is not None and sampler.draws_groups:
                text = (
                    f"is {quote(self.cohort.sampling)}, but {mode} is {quote(value)}, "
                    f"{DRAWN_AS_OTHERS_LAND}"
                )
                yield Problem(("cohort.sampling", mode), text)

    def asynchrony(self) -> Asynchrony | None:
        """Build the settings of asynchronous rounds; ``None`` if rounds are synchronous."""
        return self.asynchronous.asynchrony(self.staleness)

    def _check_update_bounds(self) -> Iterator[Problem]:
        """Refuse bounds on updates under secure aggregation or privacy, which clip instead."""
        modes = {
            "secure_aggregation.mode": self.secure_aggregation.is_on,
            "privacy.mode": self.privacy.is_on,
        }
        key = next((key for key, is_on in modes.items() if is_on), None)
        for name, default in UpdatesSection().model_dump().items():
            value = getattr(self.updates, name)
            if key is not None and value != default:
                text = f"is {quote(value)}, but {key} is on, which clips; leave it out"
                yield Problem((f"updates.{name}", key), text)

    def _check_foreign_apps(self) -> Iterator[Problem]:
        """Refuse settings that ClientApps written without fedlearn would not follow."""
        apps, own = "flower.client_apps", CLIENTS.of("own").model_dump()
        whose = f'flower.client_apps is "{self.flower.client_apps}", whose ClientApps'
        if self.secure_aggregation.is_on:
            text = (
                f"is {quote(self.secure_aggregation.mode)}, but {whose} send what they have learned"
            )
            yield Problem(
                ("secure_aggregation.mode", apps), f'{text} in the clear; set it to "off"'
            )
        if self.privacy.mode in ("distributed", "local", "example"):
            text = (
                f"is {quote(self.privacy.mode)}, but {whose} add no noise and clip no gradients; "
                'set it to "central", where the coordinator does both, or to "off"'
            )
            yield Problem(("privacy.mode", apps), text)
        if self.evaluation.fine_tune_epochs:
            text = f"is {self.evaluation.fine_tune_epochs}, but {whose} evaluate without training"
            yield Problem(("evaluation.fine_tune_epochs", apps), f"{text}; leave it out")
        if self.privacy.is_on and self.privacy.clip_quantile is not None:
            text = (
                f"is {self.privacy.clip_quantile}, but {whose} do not report whether their update "
                "is below a norm; leave it out"
            )
            yield Problem(("privacy.clip_quantile", apps), text)
        if self.cohort.sampling == "cyclic":
            text = (
                f'is "cyclic", but {whose} are known by their node, which has another id when it '
                'comes back, and another turn; use "uniform" or "poisson"'
            )
            yield Problem(("cohort.sampling", apps), text)
        if ROUND in self.client.extra:
            text = f"is what {whose} read as the round; leave it out"
            yield Problem((f"client.extra.{ROUND}", apps), text)
        asked = self.client.model_dump(exclude=set(_NOT_TRAINING))
        name = next((name for name in asked if asked[name] != own.get(name)), None)
        if name is not None:
            remedy = 'set it to "own"' if name == "optimizer" else "leave it out"
            text = (
                f"is {quote(asked[name])}, but {whose} train as they are written; {remedy}, and "
                "give what they read in client.extra"
            )
            yield Problem((f"client.{name}", apps), text)

    def _check_fedsgd(self) -> Iterator[Problem]:
        """Refuse local training other than FedSGD's.

        The learning rate is free, and so is ``shuffle``: the order does not matter in one batch.
        """
        asked = self.client.model_dump()
        plain = CLIENTS.of("sgd", epochs=1, batch_size="all").model_dump()
        for name in plain.keys() - _FREE_UNDER_FEDSGD:
            if name in asked and asked[name] != plain[name]:
                text = (
                    f"is {quote(asked[name])}, but FedSGD takes one step along the gradient; "
                    'leave it out, or use "fedavg"'
                )
                yield Problem((f"client.{name}", "algorithm.name"), text)

    def _check_missing_data(self) -> Iterator[Problem]:
        if not isinstance(self.data, NoDataSection):
            return
        if self.has_model and self.model.kind != "python":
            text = (
                f"is {quote(self.model.kind)}, which takes its shape from the data, but "
                'data.source is "none"; set it to "python" and name model.factory'
            )
            yield Problem(("model.kind", "data.source"), text)
        if self.centralized:
            text = 'is true, but data.source is "none"; remove it, or name the data'
            yield Problem(("centralized", "data.source"), text)
        if self.has_model and self.evaluation.clients == 0:
            text = (
                'is 0, but data.source is "none": nothing would measure the model; raise it, or '
                "name the data"
            )
            yield Problem(("evaluation.clients", "data.source"), text)

    def _check_secure_aggregation(self) -> Iterator[Problem]:
        mode = "secure_aggregation.mode"
        if self.centralized:
            text = f"is {quote(self.secure_aggregation.mode)}, but centralized pools the examples"
            yield Problem((mode, "centralized"), f"{text}; remove one of them")
        if (sampler := self.cohort.find_described_sampler()) is not None:
            reason = why_not_secure(sampler)
            if reason is not None:
                yield Problem(
                    ("cohort.sampling", mode), f"is {quote(self.cohort.sampling)}, {reason}"
                )
                return
        minimum, wanted = self.stragglers.min_reports, self.cohort.num_wanted
        if wanted == "auto":
            text = (
                'is "auto", but secure aggregation derives its threshold from the number of '
                "clients asked; give a number"
            )
            yield Problem(("cohort.num_wanted", "data.source", mode), text)
            return
        yield from self.secure_aggregation.problems_with(
            cohort_size=self._cohort_size,
            num_wanted=wanted,
            min_reports=None if minimum == "half" else minimum,
        )
        if self.secure_aggregation.simulate_as == "modular_sum" and (
            self.engine.transport == "memory"
        ):
            text = 'is "modular_sum", but engine.transport is "memory", which runs the protocol; '
            keys = ("secure_aggregation.simulate_as", "engine.transport")
            yield Problem(keys, f'{text}leave it out, or set engine.transport to "engine"')

    def _check_accounted_sampling(self) -> Iterator[Problem]:
        """Refuse a sampling for which privacy cannot account."""
        sampler, keys = self.cohort.find_described_sampler(), ("cohort.sampling", "privacy.mode")
        if self.privacy.mode == "example" and self.cohort.sampling == "cyclic":
            text = (
                'is "cyclic", an order that is public, but ε is computed for cohorts that are '
                'drawn at random and kept secret; set it to "uniform" or "poisson"'
            )
            yield Problem(keys, text)
        elif sampler is not None and not issubclass(sampler, SeededSampler):
            text = (
                f"is {quote(self.cohort.sampling)}, but what its cohorts cost in privacy is not "
                'known; set it to "uniform" or "poisson", or privacy.mode to "off"'
            )
            yield Problem(keys, text)

    def _check_attack(self) -> Iterator[Problem]:
        """Refuse an attack where the attackers' updates are not aggregated as they are sent."""
        clipped = "under which clients clip their own updates, as an attacker would not"
        is_on = {
            "centralized": (self.centralized, "where no client sends an update"),
            "secure_aggregation.mode": (self.secure_aggregation.is_on, clipped),
            "privacy.mode": (self.privacy.is_on, clipped),
        }
        for key, (is_set, why) in is_on.items():
            if is_set:
                text = f"is {quote(self.attack.kind)}, but {key} is on, {why}; switch one off"
                yield Problem(("attack.kind", key), text)

    def _check_privacy(self) -> Iterator[Problem]:
        mode = "privacy.mode"
        if self.centralized:
            text = f"is {quote(self.privacy.mode)}, but centralized pools the examples of all users"
            yield Problem((mode, "centralized"), f"{text}; remove one of them")
        if self.has_model and self.privacy.unit == "example":
            text = (
                'is "example", but it is for sums over examples (a query or statistics); to hide '
                'single examples of a training, set privacy.mode to "example"'
            )
            yield Problem(("privacy.unit", "model.kind"), text)
        yield from self._check_accounted_sampling()
        takes_turns, bands = self.cohort.sampling == "cyclic", self.privacy.bands
        if self.privacy.mode == "central" and takes_turns != (bands is not None):
            text = (
                'is "cyclic", which hides no client, but privacy.bands is missing; give it, 1 '
                'for independent noise, or sample by "poisson"'
                if takes_turns
                else f"is {quote(self.cohort.sampling)}, but privacy.bands is {bands}, whose ε "
                'rests on users that take turns; set it to "cyclic", or leave privacy.bands out'
            )
            yield Problem(("cohort.sampling", "privacy.bands"), text)
        if self.privacy.mode == "local" and self.cohort.sampling != "uniform":
            text = (
                f"is {quote(self.cohort.sampling)}, but sampling does not hide updates that are "
                'seen; leave it at "uniform"'
            )
            yield Problem(("cohort.sampling", mode), text)
        if not self.privacy.is_distributed:
            if self.secure_aggregation.is_on:
                text = (
                    f"is {quote(self.privacy.mode)}, but under secure aggregation clients add the "
                    'noise; set it to "distributed", or secure_aggregation.mode to "off"'
                )
                yield Problem((mode, "secure_aggregation.mode"), text)
            return
        if not self.secure_aggregation.is_on:
            text = (
                f"is {quote(self.privacy.mode)}, but without secure aggregation the coordinator "
                'sees updates that have one share of the noise; set it to "central", or '
                'secure_aggregation.mode to "complete"'
            )
            yield Problem((mode, "secure_aggregation.mode"), text)
        clip_norm = self.secure_aggregation.clip_norm
        if clip_norm != type(self.secure_aggregation).model_fields["clip_norm"].default:
            text = f"is {clip_norm:g}, but updates are clipped to privacy.clip_norm; leave it out"
            yield Problem(("secure_aggregation.clip_norm", "privacy.clip_norm"), text)
        if self.privacy.reproducible and self.engine.transport == "memory":
            text = (
                'is true, but engine.transport is "memory", whose clients draw secret noise; leave '
                'it out, or set engine.transport to "engine"'
            )
            yield Problem(("privacy.reproducible", "engine.transport"), text)

    @property
    def _cohort_size(self) -> int:
        stragglers, wanted = self.stragglers, self._num_wanted
        # Deadline and fewest reports are placeholders: they do not change how many are asked.
        return build_component(
            StragglerPolicy, stragglers, num_wanted=wanted, deadline_s=math.inf, min_reports=1
        ).cohort_size

    @property
    def _num_wanted(self) -> int:
        wanted = self.cohort.num_wanted
        assert wanted != "auto"  # resolved
        return wanted

    def _check_cohort_size(self) -> Iterator[Problem]:
        wanted, minimum = self.cohort.num_wanted, self.stragglers.min_reports
        if wanted == "auto":
            return
        if minimum != "half" and minimum > wanted:
            text = f"is {minimum}, above cohort.num_wanted ({wanted}); lower it to at most {wanted}"
            yield Problem(("stragglers.min_reports", "cohort.num_wanted"), text)
            return
        num_clients = self.num_partitioned or math.inf
        size = self._cohort_size
        if self.asynchronous.is_on and size > num_clients:
            keys = ("asynchronous.buffer_size", "cohort.num_wanted", "data.partition.num_clients")
            text = f"is {size}, and no buffer has two updates of one client, but there are "
            yield Problem(
                keys, f"{text}{num_clients}; lower it, or raise data.partition.num_clients"
            )
        elif size > num_clients:
            keys = ("cohort.num_wanted", "data.partition.num_clients", "stragglers.over_selection")
            text = f"is {wanted} and {size} clients are asked, but there are {num_clients}; "
            remedy = "lower it or stragglers.over_selection, or raise data.partition.num_clients"
            yield Problem(keys, text + remedy)

    def resolve(self, *, num_clients: int | None) -> "Config":
        """Replace each "auto" in cohort, stragglers and evaluation by a value.

        Args:
            num_clients: Number of simulated clients; ``None`` in a deployment, where it is unknown.

        Raises:
            ConfigError: With these values, keys contradict each other.

        Example:
            >>> model = {"kind": "python", "factory": "app:network"}
            >>> own = Config(data={"source": "none"}, model=model)
            >>> own.resolve(num_clients=None).stragglers.deadline_s
            600.0
            >>> own.resolve(num_clients=3).cohort.num_wanted
            3
        """
        automatic = (self.cohort.num_wanted, self.stragglers.deadline_s, self.evaluation.clients)
        if "auto" not in automatic:
            return self
        tree = self.model_dump(mode="json")
        most = math.inf if num_clients is None else num_clients
        if self.cohort.num_wanted == "auto":
            # Over-selected clients must fit into the population as well.
            fitting = min(USUAL_WANTED, most / tree["stragglers"]["over_selection"])
            tree["cohort"]["num_wanted"] = max(1, math.floor(fitting))
        if self.evaluation.clients == "auto":
            evaluated = min(_USUAL_EVALUATED, most) if self.has_model else 0
            if num_clients is not None and self.data.source != "digits":
                # So that an evaluation costs no more than the training of a round.
                evaluated = min(evaluated, tree["cohort"]["num_wanted"])
            tree["evaluation"]["clients"] = evaluated
        if self.stragglers.deadline_s == "auto":
            tree["stragglers"]["deadline_s"] = REAL_DEADLINE_S if num_clients is None else "none"
        # Validated again: the checks across tables skip what is still "auto".
        return validate(Config, tree, sources=Sources("the configuration"))

    @property
    def num_partitioned(self) -> int | None:
        """Number of clients that the partition is configured for, if it is configured."""
        return getattr(getattr(self.data, "partition", None), "num_clients", None)

    def straggler_policy(self) -> StragglerPolicy:
        """Build the straggler policy of a resolved tree."""
        wanted, stragglers = self._num_wanted, self.stragglers
        deadline_s, minimum = stragglers.deadline_s, stragglers.min_reports
        assert deadline_s != "auto"  # resolved
        return build_component(
            StragglerPolicy,
            stragglers,
            num_wanted=wanted,
            deadline_s=math.inf if deadline_s == "none" else deadline_s,
            min_reports=self._resolve_min_reports() if minimum == "half" else minimum,
        )

    def _resolve_min_reports(self) -> int:
        """Resolve ``min_reports = "half"``: half of the reports wanted, rounded up.

        It is more if secure aggregation needs more, and the full buffer in an asynchronous run.
        """
        half, secure = math.ceil(self._num_wanted / 2), self.secure_aggregation
        if self.asynchronous.is_on:
            return self._num_wanted
        if not secure.is_on:
            return half
        return max(half, secure.parameters(self._cohort_size).min_survivors)

    def __reduce__(self) -> tuple[Callable[[str], "Config"], tuple[str]]:
        """Pickle as JSON: some tables' classes are created here and cannot be found by name."""
        return Config.from_json, (self.canonical_json(),)

    def canonical_json(self) -> str:
        """Return the canonical JSON of this tree: sorted keys, no whitespace, ASCII."""
        # Always the same bytes for equal trees: runs are hashed and compared by them.
        values = self.model_dump(mode="json")
        return json.dumps(values, sort_keys=True, separators=(",", ":"), allow_nan=False)

    @classmethod
    def from_json(cls, text: str) -> "Config":
        """Load the tree that :meth:`canonical_json` wrote, in this version or an earlier one.

        Missing keys have their defaults. These must keep the behavior of versions without the key:
        a key that changes what a run does is off by default. Keys of earlier versions are
        translated: see :mod:`fedlearn.config.earlier`.

        Raises:
            ConfigError: It is not JSON, or has keys or values that this version does not know.

        Example:
            >>> Config.from_json('{"seed": 3}') == Config(seed=3)
            True
        """
        sources = Sources("the stored configuration")
        try:
            raw = json.loads(text)
        except ValueError as error:
            raise ConfigError(f"{sources.name}: not valid JSON: {error}") from error
        if not isinstance(raw, dict):
            raise ConfigError(f"{sources.name}: is {quote(raw)}, not a tree")
        try:
            raw = read_earlier(raw)
        except ValueError as error:
            raise ConfigError(f"{sources.name}: {error}") from error
        return validate(cls, raw, sources=sources)


def _imply_from_sampling(raw: dict[str, Any]) -> dict[str, Any]:  # Any: not validated yet
    """Return the defaults that the way of sampling implies, and the kind of a custom one."""
    cohort, algorithm = raw.get("cohort"), raw.get("algorithm", {})
    sampling = cohort.get("sampling") if isinstance(cohort, dict) else None
    if not isinstance(cohort, dict) or not isinstance(sampling, str):
        return {}
    if ":" in sampling:
        return {"cohort": {**cohort, "sampling": "python", "factory": sampling}}
    if sampling not in _COUNTING_EXAMPLES or not isinstance(algorithm, dict):
        return {}
    if not ALGORITHMS.has(algorithm.get("name", "fedavg"), "weight_by_examples"):
        return {}
    return {"algorithm": {"weight_by_examples": False, **algorithm}}


def _imply_from_privacy(raw: dict[str, Any]) -> dict[str, Any]:  # Any: not validated yet
    """Return the defaults that privacy implies for unset keys."""
    implied, privacy = dict[str, Any](), raw["privacy"]
    brought: dict[str, dict[str, Any]] = {"algorithm": {"weight_by_examples": False}}
    algorithm, cohort = raw.get("algorithm", {}), raw.get("cohort", {})
    name = algorithm.get("name", "fedavg") if isinstance(algorithm, dict) else None
    if not ALGORITHMS.has(name, "weight_by_examples"):
        del brought["algorithm"]
    if privacy["mode"] == "local":
        brought["cohort"] = {"sampling": "uniform"}  # sampling adds no privacy here
    elif privacy["mode"] == "example":
        brought["cohort"] = {"sampling": "uniform"}  # how clients are drawn makes no difference
    elif privacy["mode"] == "distributed":
        # The threshold is derived from the number of clients asked, so that must be fixed.
        brought["cohort"] = {"sampling": "uniform"}
        brought["secure_aggregation"] = {"mode": "complete"}
        engine = raw.get("engine", {})
        if isinstance(engine, dict) and engine.get("transport", "engine") == "engine":
            brought["secure_aggregation"]["simulate_as"] = "modular_sum"
    else:
        sampling = "poisson" if privacy.get("bands") is None else "cyclic"
        brought["cohort"] = {"sampling": sampling}
        if isinstance(cohort, dict) and cohort.get("sampling", sampling) != "uniform":
            brought["stragglers"] = {"over_selection": 1.0}
    for key, values in brought.items():
        table = raw.get(key, {})
        if isinstance(table, dict):
            implied[key] = {**values, **table}
    return implied


def config_hash(config: Config) -> str:
    """Return the SHA-256 of the canonical JSON of ``config``, hexadecimal.

    Example:
        >>> config_hash(Config()) == config_hash(Config(seed=1))
        False
    """
    return hashlib.sha256(config.canonical_json().encode()).hexdigest()
