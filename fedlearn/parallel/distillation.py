r"""What clients have learnt, taught to one model: ensemble distillation on the coordinator's data.

A round's mean model :math:`\bar x` is the student. On the coordinator's own examples d, whose
labels nobody needs, it learns what the clients' models :math:`x_k` say together:

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
from fedlearn.algorithms.strategy import State, Stepped, Strategy, Wrapped
from fedlearn.core.clock import SystemClock
from fedlearn.core.distribution import Direction
from fedlearn.core.features import Features, called
from fedlearn.core.params import Params
from fedlearn.core.ranges import Count
from fedlearn.errors import ConfigError
from fedlearn.parallel.engine import Engine, run
from fedlearn.parallel.jobs import Control
from fedlearn.parallel.streams import Stream
from fedlearn.parallel.task import Progress, Task, TrainingState
from fedlearn.training.trainer import UNATTENDED

_MODEL, _ROUNDS = "distillation/model", "distillation/rounds"
_MATRIX = 2


@dataclass(frozen=True)
class SoftCrossEntropy:
    """Cross-entropy to probabilities: labels are [batch, classes], as the outputs.

    Its gradient is that of the divergence from them.
    """

    per_example: ClassVar[bool] = True
    directions: ClassVar[Mapping[str, Direction]] = {}

    def losses(self, outputs: Tensor, labels: Tensor) -> Tensor:
        """Return the cross-entropy of each example."""
        return F.cross_entropy(outputs, labels, reduction="none")

    def metrics(self, outputs: Tensor, labels: Tensor) -> Mapping[str, Tensor]:  # noqa: ARG002
        """Return nothing beyond the loss."""
        return {}


class Taught:
    """A stream whose labels are what an ensemble says: probabilities [b, classes].

    Args:
        stream: The examples; their own labels are not looked at.
        task: Whose model the members are of.
        members: Their weights.
    """

    def __init__(self, stream: Stream, task: Task, members: Sequence[Params]) -> None:
        self._stream, self._members = stream, members
        self._model = task.make_model().eval()

    def __len__(self) -> int:
        return len(self._stream)

    @torch.no_grad()
    def batch(self, positions: range) -> tuple[Features, Tensor]:
        """Return examples and what the ensemble says of them.

        Raises:
            ConfigError: The models have no logits, [b, classes].
        """
        features, _ = self._stream.batch(positions)
        total: Tensor | None = None
        for member in self._members:
            member.load_into(self._model)
            logits = called(self._model, features)
            total = logits if total is None else total + logits
        assert total is not None  # somebody reported
        if total.dim() != _MATRIX:
            raise ConfigError(
                f"distil_steps needs a model with logits [examples, classes], but its outputs have "
                f"shape {tuple(total.shape)}; set distil_steps to 0"
            )
        return features, (total / len(self._members)).softmax(dim=1)


def _tell_nobody(_progress: Progress) -> None: ...


@dataclass(frozen=True, kw_only=True)
class Watch:
    """Who is told of a round's distillation, and may call it off.

    Attributes:
        control: Checked between steps.
        report: Told how far it is.
        report_every: Steps between two reports, >= 1.
    """

    control: Control = UNATTENDED
    report: Callable[[Progress], None] = _tell_nobody
    report_every: Count = 100


@dataclass(frozen=True)
class Distillation(FullAggregation):
    """The mean of the updates, and from there some steps towards what all models say together.

    Attributes:
        mean: Of the updates.
        lanes: What clients contribute.
        task: The model, the coordinator's examples, and how the student is trained.
        num_steps: Of each round.
        base: The global model that the updates are relative to: [P]; ``None`` before there is one.
        num_rounds: Rounds before this one, by which the examples go on.
        watch: Who is told of it, and may call it off.
    """

    mean: WeightedMean
    lanes: Sequence[LaneSpec]
    task: Task
    num_steps: Count
    base: Tensor | None = None
    num_rounds: int = 0
    watch: Watch = field(default_factory=Watch)

    def weigh(self, num_examples_B: Tensor) -> Tensor:
        """Return the mean's weights."""
        return self.mean.weigh(num_examples_B)

    def combine(self, updates: Updates) -> Lanes:
        """Return the means, with the distilled model's delta in place of the mean's."""
        assert self.base is not None  # a round has begun
        module = self.task.make_model()
        fresh, base = Params.of(module), self.base
        sums = self.mean.init(self.lanes, fresh.layout, device=base.device)
        lanes = dict(self.mean.finalize(self.mean.accumulate(sums, updates)).lanes)
        # Always in the same order: a sum of logits should not hang on who was the first to report.
        order = sorted(range(len(updates.client_ids)), key=updates.client_ids.__getitem__)
        rows = [updates.lanes["delta"][each] for each in order]
        members = [fresh.with_vector((base + row).cpu()) for row in rows]
        student = fresh.with_vector((base + lanes["delta"]).cpu())
        lanes["delta"] = self._taught(student, members).to(base) - base
        return lanes

    def _taught(self, student: Params, members: Sequence[Params]) -> Tensor:
        """Return the student's vector after its steps."""
        task, done = self.task, self.num_rounds * self.num_steps
        until, watch = done + self.num_steps, self.watch
        taught = Taught(task.stream, task, members)
        task = replace(task, stream=taught, objective=SoftCrossEntropy())
        engine = Engine(task, device=student.vector.device)
        progress = torch.tensor([done, 0.0, 0.0, 0.0], dtype=torch.float64)
        engine.adopt(TrainingState(model=student.named(), progress=progress))
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
class Distilling(Wrapped):
    """A strategy whose rounds end in ensemble distillation.

    Attributes:
        inner: The strategy; its aggregation is a mean.
        task: The model, the coordinator's examples, and how the student is trained: in one process.
        num_steps: Of each round, >= 1.
        base: The global model of this round; ``None`` outside of one.
        num_rounds: Rounds before it.
        watch: Who is told of its distillation, and may call it off.

    Raises:
        ConfigError: The aggregation is no mean, the objective no plain cross-entropy, or the
            mesh of several processes.
    """

    task: Task
    num_steps: Count
    base: Tensor | None = None
    num_rounds: int = 0
    watch: Watch = field(default_factory=Watch, repr=False)

    own: ClassVar[frozenset[str]] = frozenset({_MODEL, _ROUNDS})

    def __post_init__(self) -> None:
        rule, mesh = self.inner.aggregation, self.task.plan.spread.mesh
        if not isinstance(rule, WeightedMean):
            raise ConfigError(
                f"distil_steps is {self.num_steps}, whose student begins at the mean, but updates "
                f"are combined by {type(rule).__name__}; set one of them aside"
            )
        loss = self.task.objective
        if not isinstance(loss, CrossEntropy) or loss.class_weights or loss.label_smoothing:
            raise ConfigError(
                f"distil_steps is {self.num_steps}, which teaches the probabilities of classes, "
                f"but the loss is {loss}, not plain cross-entropy; set distil_steps to 0"
            )
        if mesh.world_size > 1:
            raise ConfigError(
                f"distil_steps is {self.num_steps}, but the mesh is {mesh}: other processes have "
                "no models of clients; train in one process, or set distil_steps to 0"
            )

    @property
    def needs_same_round(self) -> str:
        """Teachers are the models of the clients, which are told by the model they began at."""
        return "its teachers are the round's model plus each update"

    @property
    def aggregation(self) -> Distillation:
        """The inner mean, distilled."""
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
        """Return the strategy of the round, whose clients begin at the model in the state."""
        inner = self.inner.at(self.inner_state(state))
        return replace(self, inner=inner, base=state[_MODEL], num_rounds=int(state[_ROUNDS]))

    def step(self, params: Params, aggregate: Aggregate, state: State) -> Stepped:
        """Take the inner strategy's step, and remember its model."""
        stepped = self.inner.step(params, aggregate, self.inner_state(state))
        own = {_MODEL: stepped.params.vector, _ROUNDS: state[_ROUNDS] + 1}
        return replace(stepped, state={**stepped.state, **own})
