r"""Ensemble distillation (FedDF): train the mean model to predict what all clients' models do.

A round's mean model :math:`\bar x` is the student. On the coordinator's own examples d, whose
labels are not used, it learns the joint predictions of the clients' models :math:`x_k`:

.. math:: \min_x \; \mathrm{KL}\Big(\sigma\big(\tfrac{1}{K} \textstyle\sum_k f(x_k, d)\big),\;
          \sigma\big(f(x, d)\big)\Big)

References:
    Lin, Kong, Stich and Jaggi, 2020, `Ensemble Distillation for Robust Model Fusion in Federated
    Learning <https://arxiv.org/abs/2006.07242>`_, algorithm 1 (FedDF).
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor

from fedlearn.algorithms.aggregations import FullAggregation, WeightedMean
from fedlearn.algorithms.lanes import Aggregate, Lanes, LaneSpec, Updates
from fedlearn.algorithms.objectives import CrossEntropy
from fedlearn.algorithms.strategy import State, StepResult, Strategy, StrategyWrapper
from fedlearn.core.clock import SystemClock
from fedlearn.core.distribution import Direction
from fedlearn.core.features import Features, call_module
from fedlearn.core.params import Params
from fedlearn.core.ranges import Count
from fedlearn.errors import ConfigError
from fedlearn.parallel.engine import RankTrainer, run
from fedlearn.parallel.jobs import Control
from fedlearn.parallel.streams import Stream
from fedlearn.parallel.task import Progress, Task, TrainingState
from fedlearn.training.trainer import UNATTENDED

_MODEL, _ROUNDS = "distillation/model", "distillation/rounds"
_MATRIX = 2


@dataclass(frozen=True)
class SoftCrossEntropy:
    """Cross-entropy with probabilities as labels: [batch, classes], like the outputs.

    It differs from the KL divergence by a constant, so the gradients are the same.
    """

    per_example: ClassVar[bool] = True
    directions: ClassVar[Mapping[str, Direction]] = {}

    def losses(self, outputs: Tensor, labels: Tensor) -> Tensor:
        """Return the cross-entropy of each example."""
        return F.cross_entropy(outputs, labels, reduction="none")

    def metrics(self, outputs: Tensor, labels: Tensor) -> Mapping[str, Tensor]:  # noqa: ARG002
        """Return no measures besides the loss."""
        return {}


class Taught:
    """A stream whose labels are an ensemble's predictions: probabilities [b, classes].

    Args:
        stream: The examples; their own labels are ignored.
        task: Task that builds the network of the ensemble's members.
        members: The members' weights.
    """

    def __init__(self, stream: Stream, task: Task, members: Sequence[Params]) -> None:
        self._stream, self._members = stream, members
        self._model = task.make_model().eval()

    def __len__(self) -> int:
        return len(self._stream)

    @torch.no_grad()
    def batch(self, positions: range) -> tuple[Features, Tensor]:
        """Return the examples at these positions, and the ensemble's predictions for them.

        Raises:
            ConfigError: The model's outputs are not logits [b, classes].
        """
        features, _ = self._stream.batch(positions)
        total: Tensor | None = None
        for member in self._members:
            member.load_into(self._model)
            logits = call_module(self._model, features)
            total = logits if total is None else total + logits
        assert total is not None  # at least one client has reported
        if total.dim() != _MATRIX:
            raise ConfigError(
                f"distil_steps needs a model with logits [examples, classes], but its outputs have "
                f"shape {tuple(total.shape)}; set distil_steps to 0"
            )
        # sigma(1/K sum_k f(x_k, d)): FedDF averages logits, not probabilities.
        return features, (total / len(self._members)).softmax(dim=1)


def _ignore_progress(_progress: Progress) -> None: ...


@dataclass(frozen=True, kw_only=True)
class DistillationObserver:
    """Observer of a round's distillation, which may also cancel it.

    Attributes:
        control: Checked between steps.
        report: Receives the progress reports.
        report_every: Steps between two reports, >= 1.
    """

    control: Control = UNATTENDED
    report: Callable[[Progress], None] = _ignore_progress
    report_every: Count = 100


@dataclass(frozen=True)
class Distillation(FullAggregation):
    """Averages the updates, then trains the mean model on the predictions of all clients' models.

    Attributes:
        mean: The rule that averages the updates.
        lanes: The lanes of an update.
        task: The model, the coordinator's examples, and how the student is trained.
        num_steps: Steps of distillation in each round.
        base: The global model that the updates are relative to: [P]; ``None`` outside of a round.
        num_rounds: Number of earlier rounds, from which the position in the examples follows.
        watch: Observes the distillation, and may cancel it.
    """

    mean: WeightedMean
    lanes: Sequence[LaneSpec]
    task: Task
    num_steps: Count
    base: Tensor | None = None
    num_rounds: int = 0
    watch: DistillationObserver = field(default_factory=DistillationObserver)

    def weigh(self, num_examples_B: Tensor) -> Tensor:
        """Return the mean's weights."""
        return self.mean.weigh(num_examples_B)

    def combine(self, updates: Updates) -> Lanes:
        """Return the means, with the mean delta replaced by the distilled model's."""
        assert self.base is not None  # a round has begun
        module = self.task.make_model()
        fresh, base = Params.of(module), self.base
        sums = self.mean.init(self.lanes, fresh.layout, device=base.device)
        lanes = dict(self.mean.finalize(self.mean.accumulate(sums, updates)).lanes)
        # Sort by client: the rounding of summed logits must not depend on who reported first.
        order = sorted(range(len(updates.client_ids)), key=updates.client_ids.__getitem__)
        rows = [updates.lanes["delta"][each] for each in order]
        members = [fresh.with_vector((base + row).cpu()) for row in rows]
        student = fresh.with_vector((base + lanes["delta"]).cpu())
        lanes["delta"] = self._train_student(student, members).to(base) - base
        return lanes

    def _train_student(self, student: Params, members: Sequence[Params]) -> Tensor:
        """Train the student on the members' predictions; return its vector: [P]."""
        task, done = self.task, self.num_rounds * self.num_steps
        until, watch = done + self.num_steps, self.watch
        taught = Taught(task.stream, task, members)
        task = replace(task, stream=taught, objective=SoftCrossEntropy())
        engine = RankTrainer(task, device=student.vector.device)
        # Steps are counted through all rounds, so that each round continues with new examples.
        progress = torch.tensor([done, 0.0, 0.0, 0.0], dtype=torch.float64)
        engine.adopt(TrainingState(model=student.to_tensors(), progress=progress))
        run(
            engine,
            until=until,
            clock=SystemClock(),
            report_every=watch.report_every,
            report=lambda progress: watch.report(replace(progress, num_steps=until)),
            after_step=lambda _: watch.control.check(),
        )
        return student.layout.pack(engine.state().model)


@dataclass(frozen=True)
class Distilling(StrategyWrapper):
    """A strategy whose rounds end in ensemble distillation.

    Attributes:
        inner: The wrapped strategy, whose aggregation must be a weighted mean.
        task: The model, the coordinator's examples, and how the student is trained: in one process.
        num_steps: Steps of distillation in each round, >= 1.
        base: The global model of this round: [P]; ``None`` outside of a round.
        num_rounds: Number of earlier rounds.
        watch: Observes the distillation, and may cancel it.

    Raises:
        ConfigError: The aggregation is not a weighted mean, the objective is not plain
            cross-entropy, or the mesh has several processes.
    """

    task: Task
    num_steps: Count
    base: Tensor | None = None
    num_rounds: int = 0
    watch: DistillationObserver = field(default_factory=DistillationObserver, repr=False)

    own: ClassVar[frozenset[str]] = frozenset({_MODEL, _ROUNDS})

    def __post_init__(self) -> None:
        rule, mesh = self.inner.aggregation, self.task.plan.spread.mesh
        if not isinstance(rule, WeightedMean):
            raise ConfigError(
                f"distil_steps is {self.num_steps}, whose student starts at the mean, but updates "
                f"are combined by {type(rule).__name__}; remove one of the two"
            )
        loss = self.task.objective
        if not isinstance(loss, CrossEntropy) or loss.class_weights or loss.label_smoothing:
            raise ConfigError(
                f"distil_steps is {self.num_steps}, which distils class probabilities, but the "
                f"loss is {loss}, not plain cross-entropy; set distil_steps to 0"
            )
        if mesh.world_size > 1:
            raise ConfigError(
                f"distil_steps is {self.num_steps}, but the mesh is {mesh}: other processes do "
                "not have the clients' models; train in one process, or set distil_steps to 0"
            )

    @property
    def needs_same_round(self) -> str:
        """Why updates must be relative to one model: the clients' models are rebuilt from it."""
        return "its teachers are the round's model plus each update"

    @property
    def aggregation(self) -> Distillation:
        """The inner strategy's mean, followed by distillation."""
        mean = self.inner.aggregation
        assert isinstance(mean, WeightedMean)  # checked when this was made
        task, num_steps = self.task, self.num_steps
        return Distillation(
            mean, self.lanes, task, num_steps, self.base, self.num_rounds, self.watch
        )

    def init(self, params: Params) -> State:
        """Return the inner strategy's state, and the model of the first round."""
        rounds = torch.zeros((), dtype=torch.int64)
        return {**self.inner.init(params), _MODEL: params.vector, _ROUNDS: rounds}

    def at(self, state: State) -> Strategy:
        """Return the strategy for the round that starts from the model in the state."""
        inner = self.inner.at(self.inner_state(state))
        return replace(self, inner=inner, base=state[_MODEL], num_rounds=int(state[_ROUNDS]))

    def step(self, params: Params, aggregate: Aggregate, state: State) -> StepResult:
        """Take the inner strategy's step, and store the new model in the state."""
        stepped = self.inner.step(params, aggregate, self.inner_state(state))
        own = {_MODEL: stepped.params.vector, _ROUNDS: state[_ROUNDS] + 1}
        return replace(stepped, state={**stepped.state, **own})
