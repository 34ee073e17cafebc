"""Configuration of training: model, loss, metrics, algorithm and local training."""

from collections.abc import Callable, Iterator
from dataclasses import fields
from functools import partial
from typing import Literal

from pydantic import Field
from torch import Tensor, nn

from fedlearn.algorithms import recipes
from fedlearn.algorithms.adam import LocalAdam
from fedlearn.algorithms.adaptive_fedprox import AdaptiveFedProx
from fedlearn.algorithms.apfl import APFL
from fedlearn.algorithms.asynchronous import Asynchrony
from fedlearn.algorithms.clustered import ClusteredFL
from fedlearn.algorithms.ditto import Ditto
from fedlearn.algorithms.extra_settings import ExtraSettings
from fedlearn.algorithms.fedala import FedALA
from fedlearn.algorithms.fedbabu import FedBABU
from fedlearn.algorithms.feddyn import FedDyn
from fedlearn.algorithms.fedexp import FedExP
from fedlearn.algorithms.fednova import FedNova
from fedlearn.algorithms.fedrep import FedRep
from fedlearn.algorithms.gradient_clipping import ClippedGradients
from fedlearn.algorithms.ifca import IFCA
from fedlearn.algorithms.knn_per import KnnPer
from fedlearn.algorithms.local import LocalSgd, LocalUpdate
from fedlearn.algorithms.metrics import Metric
from fedlearn.algorithms.mime_lite import MimeLite
from fedlearn.algorithms.moon import MOON
from fedlearn.algorithms.objectives import (
    BinaryCrossEntropy,
    CrossEntropy,
    CustomLoss,
    MeanSquaredError,
    Objective,
)
from fedlearn.algorithms.own_training import OwnTraining
from fedlearn.algorithms.partial_models import FedBN, FedPer, LGFedAvg
from fedlearn.algorithms.per_fedavg import PerFedAvg
from fedlearn.algorithms.pfedme import PFedMe
from fedlearn.algorithms.qfedavg import QFedAvg
from fedlearn.algorithms.query import Query, QueryStrategy
from fedlearn.algorithms.rate_schedules import ScheduledRate
from fedlearn.algorithms.round_settings import RoundSettings
from fedlearn.algorithms.server_schedules import ScheduledFedAvg
from fedlearn.algorithms.strategy import Strategy
from fedlearn.config.components import (
    DeclaredSection,
    Make,
    build_component,
    find_problem,
    kind,
    kinds,
)
from fedlearn.config.own_functions import (
    OwnFunctionSection,
    bind_own_function,
    import_function,
    require_attributes,
    wrong_return_error,
)
from fedlearn.config.section import Args, Factory, PathText, Problem, Scalars, Section
from fedlearn.core.params import NoModel
from fedlearn.core.ranges import Count
from fedlearn.simulation import models
from fedlearn.simulation.executors.trainers import MakeTrainer
from fedlearn.training.trainer import LocalTrainer


class ModelSection(DeclaredSection):
    """What is trained."""

    kind: str = Field(description="Which model is trained.")


class PythonModelSection(OwnFunctionSection, ModelSection):
    """A model that a function of yours returns."""

    def build(self, **given: object) -> Callable[[], nn.Module]:
        """Return a function that builds the network; it does not depend on the data."""
        make = bind_own_function("model.factory", self.factory, self.args)
        return partial(_call_model, self.factory, make)


class NoModelSection(ModelSection):
    """No model: a query needs none."""

    def build(self, **given: object) -> Callable[[], nn.Module]:
        """Return the class that stands for the model."""
        return NoModel


def _call_model(factory: str, make: Callable[[], object]) -> nn.Module:
    made = make()
    if not isinstance(made, nn.Module):
        raise wrong_return_error("model.factory", factory, made, "a torch module")
    return made


MODELS = kinds(
    "kind",
    ModelSection,
    kind(
        "mlp",
        "Linear layers with ReLU between them, on flattened features.",
        models.Mlp,
        hidden=(128,),
    ),
    kind("logistic", "Multinomial logistic regression on flattened features.", models.Logistic),
    kind("cnn", "Two convolutions with pooling and two linear layers (LeNet's shape).", models.Cnn),
    kind("python", "A model that a function of yours returns.", PythonModelSection),
    kind(
        "none", "No model: the algorithm is a query, which asks clients for sums.", NoModelSection
    ),
    given=("feature_shape", "num_outputs"),
)


class LossSection(DeclaredSection):
    """The loss that local training minimizes."""

    kind: str = Field(description="The loss that local training minimizes.")


class PythonLossSection(OwnFunctionSection, LossSection):
    """A loss that a function of yours returns."""

    per_example: bool = Field(
        True,
        description="Whether the loss is one number per example; false: one number per batch, "
        "which couples the batch's examples.",
    )

    def build(self, **given: object) -> Objective:
        """Call the custom function and wrap the loss that it returns."""
        made = bind_own_function("loss.factory", self.factory, self.args)()
        if not callable(made):
            needed = "a function from outputs and labels to one loss an example"
            raise wrong_return_error("loss.factory", self.factory, made, needed)
        return CustomLoss(made, per_example=self.per_example)


class CrossEntropyLossSection(LossSection):
    """Softmax cross-entropy over classes, with accuracy."""

    def problems(self) -> Iterator[Problem]:
        """Refuse values that the loss refuses."""
        yield from find_problem(self.build)

    def build(self, **given: object) -> CrossEntropy:
        """Build the loss."""
        return build_component(CrossEntropy, self, **given)


LOSSES = kinds(
    "kind",
    LossSection,
    kind(
        "cross_entropy",
        "Softmax cross-entropy over classes, with accuracy.",
        CrossEntropyLossSection,
        CrossEntropy,
    ),
    kind("mse", "Squared error, the mean over an example's outputs.", MeanSquaredError),
    kind(
        "bce_with_logits",
        "Logistic loss, with accuracy at the threshold 1/2. One logit an example; labels 0 or 1.",
        BinaryCrossEntropy,
    ),
    kind("python", "A loss that a function of yours returns.", PythonLossSection),
)


class MetricSection(Section):
    """A metric over whole sets that a function of yours returns."""

    factory: Factory | None = Field(
        None,
        description='The function: "module:function" or "path/to/file.py:function"; without it '
        "only the trainers of deployed clients measure it.",
    )
    args: Args = Field({}, description="Keyword arguments of the function.")
    direction: Literal["max", "min"] = Field(
        description='"max" if higher is better, "min" if lower is.'
    )

    def metric(self, name: str) -> Metric:
        """Build the metric; the table must have a factory."""
        assert self.factory is not None
        key = f"metrics.{name}.factory"
        return Metric(bind_own_function(key, self.factory, self.args)(), direction=self.direction)


class AlgorithmSection(DeclaredSection):
    """The federated algorithm."""

    name: str = Field(description="The federated algorithm.")
    keep_local: list[str] = Field(
        [],
        description="Parts of the model that each client keeps for itself: patterns of tensor "
        'names, such as "head.*", or of layer classes, such as "type:BatchNorm*".',
    )

    def strategy(self, local: LocalUpdate) -> Strategy:
        """Build the strategy; raises ValueError if it does not fit the local update."""
        made: Strategy = self.build(local=local)
        return made


class FedSgdSection(AlgorithmSection):
    """One gradient step a round: client.epochs is 1 and client.batch_size "all" by default."""

    def strategy(self, local: LocalUpdate) -> Strategy:
        """Build FedSGD with the learning rate of ``local``."""
        assert isinstance(local, LocalSgd)  # the configuration makes sure
        return build_component(recipes.FedSGD, self, learning_rate=local.learning_rate)


class PythonAlgorithmSection(AlgorithmSection):
    """Your own strategy; its file may be given as the name itself."""

    factory: Factory = Field(
        description='The strategy: "module:Class" or "path/to/file.py:Class"; it is called with '
        "local, what the table client describes, and args."
    )
    args: Args = Field({}, description="Further keyword arguments.")

    def strategy(self, local: LocalUpdate) -> Strategy:
        """Call the factory and check that it made a strategy, or a query.

        The class of a query is called without ``local``, since its clients do not train.
        """
        key, factory = "algorithm.name", import_function("algorithm.name", self.factory)
        is_query = isinstance(factory, type) and issubclass(factory, Query)
        given = {} if is_query else {"local": local}
        made = bind_own_function(key, self.factory, {**given, **self.args})()
        if isinstance(made, Query):
            return QueryStrategy(made)
        vectors, methods = (
            ("transforms", "lanes", "broadcasts"),
            ("init", "at", "broadcast", "step"),
        )
        needed = ("local", "aggregation", *vectors, *methods)
        remedy = "let its class inherit from fedlearn.Strategy"
        require_attributes(key, self.factory, made, needed, remedy)
        strategy: Strategy = made
        return strategy


class FedBuffSection(AlgorithmSection):
    """FedBuff; the table ``asynchronous`` says when it steps."""

    def strategy(self, local: LocalUpdate) -> Strategy:
        """Build the server's step for the mean update of a buffer."""
        return build_component(
            recipes.FedBuff, self, local=local, **_ANY_BUFFER, buffer_size=1
        ).strategy


class FedAsyncSection(AlgorithmSection):
    """FedAsync: FedBuff whose buffer is one update."""

    def strategy(self, local: LocalUpdate) -> Strategy:
        """Build the server's step for a single update."""
        return build_component(recipes.FedAsync, self, local=local, **_ANY_BUFFER).strategy


#: Placeholders that the recipes require; the strategy does not depend on them.
_ANY_BUFFER = {"concurrency": 1, "max_staleness": 0}

ALGORITHMS = kinds(
    "name",
    AlgorithmSection,
    kind(
        "fedavg",
        "Federated averaging: the new model is the mean of the local ones.",
        recipes.FedAvg,
    ),
    kind(
        "fedsgd",
        'FedSGD, one gradient step a round: client.epochs is 1 and client.batch_size "all" by'
        " default.",
        FedSgdSection,
        recipes.FedSGD,
    ),
    kind(
        "fedprox",
        "FedProx: FedAvg with a pull of ``proximal`` (mu) towards the global model.",
        recipes.FedProx,
        proximal=0.01,
    ),
    kind(
        "adaptive_fedprox",
        "FedProx whose pull rises when the training loss does, and falls when that keeps falling.",
        AdaptiveFedProx,
        proximal=1.0,
    ),
    kind(
        "fedavgm",
        "Federated averaging with a server learning rate and server momentum.",
        recipes.FedAvgM,
        server_learning_rate=1.0,
        server_momentum=0.9,
    ),
    kind(
        "scheduled_fedavg",
        "FedAvgM with a schedule of the server's learning rate.",
        ScheduledFedAvg,
        server_learning_rate=1.0,
    ),
    kind(
        "fedadagrad",
        "FedAdagrad: the second moment is the sum of squared deltas.",
        recipes.FedAdagrad,
        server_learning_rate=0.1,
        beta_1=0.0,
        tau=1e-3,
    ),
    kind(
        "fedadam",
        "FedAdam: the second moment is an exponential mean of squared deltas.",
        recipes.FedAdam,
        server_learning_rate=0.1,
        beta_1=0.9,
        beta_2=0.99,
        tau=1e-3,
    ),
    kind(
        "fedyogi",
        "FedYogi: the second moment moves additively, so it forgets more slowly.",
        recipes.FedYogi,
        server_learning_rate=0.1,
        beta_1=0.9,
        beta_2=0.99,
        tau=1e-3,
    ),
    kind(
        "scaffold",
        "SCAFFOLD with option II for the clients' control variates.",
        recipes.Scaffold,
        server_learning_rate=1.0,
    ),
    kind(
        "easgd",
        "Elastic averaging SGD, synchronous or, with one client a round, round robin.",
        recipes.EASGD,
        elasticity=0.3,
    ),
    kind(
        "fedexp",
        "FedExP: FedAvg whose server step grows when clients' updates disagree.",
        FedExP,
        epsilon=1e-3,
    ),
    kind(
        "feddyn",
        "FedDyn: a regularizer that clients keep, so that data that differ cause no drift.",
        FedDyn,
        alpha=0.1,
    ),
    kind(
        "mime_lite",
        "MIME-lite: FedAvg whose clients follow a momentum that the server computes.",
        MimeLite,
        server_momentum=0.9,
    ),
    kind(
        "fednova",
        "FedNova: FedAvg of updates per step, for clients that take different numbers of steps.",
        FedNova,
    ),
    kind(
        "moon",
        "MOON: FedAvg with a contrast of representations, to the client's last model.",
        MOON,
        contrast=1.0,
        temperature=0.5,
    ),
    kind(
        "ditto",
        "Ditto: FedAvg, with a personal model of each client that is pulled to the global one.",
        Ditto,
        personal_learning_rate=0.1,
        personal_pull=0.5,
    ),
    kind(
        "apfl",
        "APFL: each client uses a mixture of the global model and its own.",
        APFL,
        personal_learning_rate=0.1,
        mixing=0.5,
        adapts_mixing=False,
    ),
    kind(
        "ifca",
        "IFCA: several models, of which each client trains the one with the lowest loss.",
        IFCA,
        num_clusters=2,
    ),
    kind(
        "clustered",
        "Clustered FL: clusters whose clients' updates contradict each other are split.",
        ClusteredFL,
        max_clusters=4,
        largest_mean=0.4,
        least_update=1.6,
    ),
    kind(
        "perfedavg",
        "Per-FedAvg: FedAvg of a model that clients adapt by one step of training.",
        PerFedAvg,
        adaptation_rate=0.05,
    ),
    kind(
        "pfedme",
        "pFedMe: personal models that attract the clients' models (Moreau envelopes).",
        PFedMe,
        attachment=15.0,
        personal_steps=5,
        personal_learning_rate=0.05,
    ),
    kind(
        "qfedavg",
        "q-FedAvg: an average in which clients with a large loss count more.",
        QFedAvg,
        fairness=1.0,
        step_size=0.1,
    ),
    kind(
        "fedmedian",
        "FedAvg with the coordinate-wise median in place of the mean.",
        recipes.FedMedian,
    ),
    kind(
        "fedper",
        "FedPer: clients share the base layers and keep the personalization layers.",
        FedPer,
    ),
    kind(
        "fedrep",
        "FedRep: clients share the body and keep a head, which they train before the body.",
        FedRep,
        head_epochs=1,
    ),
    kind(
        "fedbabu",
        "FedBABU: clients train only the body; the head keeps its initial values.",
        FedBABU,
    ),
    kind(
        "fedala",
        "FedALA: each client starts from a learned mixture of its last model and the global one.",
        FedALA,
        mixing_rate=1.0,
        mixing_share=0.8,
    ),
    kind(
        "knn_per",
        "kNN-Per: the global model, corrected by each client's nearest training examples.",
        KnnPer,
        num_neighbors=10,
        neighbor_weight=0.5,
    ),
    kind(
        "fedbn",
        "FedBN: clients keep BatchNorm layers, with their statistics.",
        FedBN,
    ),
    kind(
        "lgfedavg",
        "LG-FedAvg: clients keep the first layers, their representation.",
        LGFedAvg,
    ),
    kind(
        "fedbuff",
        "FedBuff; the table ``asynchronous`` says when it steps.",
        FedBuffSection,
        recipes.FedBuff,
    ),
    kind(
        "fedasync",
        "FedAsync: FedBuff whose buffer is one update.",
        FedAsyncSection,
        recipes.FedAsync,
        mixing=0.6,
    ),
    kind(
        "python",
        "Your own strategy; its file may be given as the name itself.",
        PythonAlgorithmSection,
    ),
    given=("local", "learning_rate", *(each.name for each in fields(Asynchrony))),
)


class ClientSection(DeclaredSection):
    """Local training."""

    optimizer: str = Field(description="How a client trains.")
    epochs: Count = Field(2, description="E, passes over the local examples a round, >= 1.")
    batch_size: Count | Literal["all"] = Field(
        3, description='Examples a step, >= 1; "all" takes all of a client at once.'
    )
    trainer: Factory | None = Field(
        None,
        description="In a simulation, the trainer to use instead of fedlearn's own: a function "
        "from a client's features and labels to a LocalTrainer. Deployed clients "
        "bring theirs.",
    )
    bundle: PathText | None = Field(
        None,
        description="Path of a bundle, the trainer that deployed clients run once their owners "
        "approve it; not set: each client runs its own. A simulation ignores it.",
    )
    bundle_digest: str | None = Field(
        None,
        pattern="^[0-9a-f]{64}$",
        description="SHA-256 of the bundle, as `fedlearn bundle show` prints it: a file with "
        "another one is refused. A run that is queued keeps that of its submission; not set: any.",
    )
    trainer_args: Args = Field({}, description="Further keyword arguments of the trainer.")
    extra: Scalars = Field(
        {},
        description="Free-form settings that are broadcast to every trainer, by name: strings, "
        "booleans and finite numbers. A trainer finds them in context.extra, a "
        "ClientApp of Flower in `config`. Trainers that do not support a setting "
        "refuse it, as fedlearn's own trainer does.",
    )

    by_round: Factory | None = Field(
        None,
        description="A function from the round's number, starting at 0, to its settings, which "
        'replace those here, such as {"learning_rate": 0.1, "extra.NAME": 2}. The '
        "same number must always give the same settings.",
    )

    def problems(self) -> Iterator[Problem]:
        """Refuse ``trainer_args`` without a trainer, and values that the local update refuses."""
        if self.trainer_args and self.trainer is None:
            text = "are given, but there is no client.trainer that takes them"
            yield Problem(("trainer_args", "trainer"), text)
        if self.bundle_digest is not None and self.bundle is None:
            yield Problem(("bundle_digest", "bundle"), "has no effect without client.bundle")
        yield from find_problem(self.local_update)
        yield from find_problem(
            partial(ExtraSettings, inner=OwnTraining(), extra=tuple(self.extra.items()))
        )

    def local_update(self) -> LocalUpdate:
        """Build the clients' local update; raises ValueError if values contradict each other."""
        size = None if self.batch_size == "all" else self.batch_size
        if self.optimizer == "own":
            return build_component(OwnTraining, self, batch_size=size)
        if self.optimizer == "sgd":
            local: LocalUpdate = build_component(LocalSgd, self, batch_size=size)
        else:
            local = build_component(
                LocalAdam, self, batch_size=size, decoupled=self.optimizer == "adamw"
            )
        if self.model_dump()["gradient_clip_norm"] is not None:
            local = build_component(ClippedGradients, self, inner=local)
        scheduled = build_component(ScheduledRate, self, inner=local)
        # A schedule with only default values changes nothing, so it is left out.
        return local if scheduled == ScheduledRate(inner=local) else scheduled

    def settings_by_round(self) -> RoundSettings | None:
        """Return the function from round number to settings; ``None`` if they do not change."""
        return None if self.by_round is None else import_function("client.by_round", self.by_round)

    def make_trainer(self) -> MakeTrainer | None:
        """Return the factory of simulated clients' trainers; ``None`` for fedlearn's own."""
        if self.trainer is None:
            return None
        function = import_function("client.trainer", self.trainer)
        return partial(_make_trainer, self.trainer, partial(function, **self.trainer_args))


def _make_trainer(
    name: str, make: Callable[..., LocalTrainer], features: Tensor, labels: Tensor
) -> LocalTrainer:
    made = make(features, labels)
    needed, remedy = ("train", "evaluate", "honors"), "it must be a LocalTrainer"
    require_attributes("client.trainer", name, made, needed, remedy)
    return made


_WRAPPERS: tuple[Make, ...] = (ClippedGradients, ScheduledRate)

CLIENTS = kinds(
    "optimizer",
    ClientSection,
    kind(
        "sgd",
        "Minibatch SGD for E epochs with optional momentum and weight decay.",
        LocalSgd,
        *_WRAPPERS,
        learning_rate=0.3,
        gradient_clip_norm=None,
    ),
    kind(
        "adam adamw",
        "Minibatch Adam for E epochs; with decoupled decay, AdamW.",
        LocalAdam,
        *_WRAPPERS,
        learning_rate=0.001,
        beta_1=0.9,
        beta_2=0.999,
        epsilon=1e-8,
        keep_moments=False,
        gradient_clip_norm=None,
    ),
    kind(
        "own",
        "Whatever the clients' trainers do: they choose the optimizer, and receive only how much "
        "to train.",
        OwnTraining,
        epochs=1,
        batch_size="all",
    ),
    given=("decoupled", "inner"),
)
