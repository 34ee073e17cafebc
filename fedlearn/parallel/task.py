"""The description of a training, its state, and its progress reports."""

from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor, nn

from fedlearn.algorithms.objectives import CrossEntropy, Objective, example_weights
from fedlearn.core.features import require_single_input
from fedlearn.core.improvement import Goal
from fedlearn.core.ranges import Count, Ranged
from fedlearn.errors import ConfigError, DataError
from fedlearn.parallel.parts import require_whole
from fedlearn.parallel.plan import TrainingPlan
from fedlearn.parallel.streams import Stream
from fedlearn.training.example_gradients import batch_statistics


@dataclass(frozen=True, kw_only=True, eq=False)
class TrainingState:
    """The state of a training: everything that it needs to continue.

    Attributes:
        model: Parameters and buffers by name.
        optimizer: State of the optimizer, by parameter and name: ``"0.weight/exp_avg"``. If it is
            empty, the optimizer starts from scratch.
        progress: Number of steps taken; then, for float16, the loss scale, the steps since it last
            changed, and the steps skipped: float64 [4].
    """

    model: Mapping[str, Tensor]
    optimizer: Mapping[str, Tensor] = field(default_factory=dict)
    progress: Tensor = field(default_factory=lambda: torch.zeros(4, dtype=torch.float64))

    @property
    def step_num(self) -> int:
        """Steps taken."""
        return int(self.progress[0])


@dataclass(frozen=True, kw_only=True, eq=False)
class Evaluation(Ranged):
    """How the model is evaluated during a training.

    Attributes:
        measure: Returns the metrics of the model, by name; only rank 0 calls it.
        every: Steps from one evaluation to the next, >= 1; the last step is always evaluated.
        goal: The metric that decides which model is the best; the training ends at its target.
        patience: Evaluations in a row without improvement after which the training ends, >= 1;
            ``None``: it does not end early for this reason.
    """

    measure: Callable[[TrainingState], Mapping[str, float]]
    every: Count
    goal: Goal
    patience: Count | None = None


@dataclass(frozen=True, kw_only=True, eq=False)
class Task:
    """A training's model, loss, data and plan; all of its processes build the same task.

    Attributes:
        make_model: Builds the network on the CPU; all processes start from the weights of rank 0.
        objective: The loss to minimize.
        stream: The examples.
        plan: Batches, steps, optimizer and mesh.
        num_readers: Processes of each rank that prefetch batches, >= 0; 0: the rank itself reads.
        evaluation: How the model is evaluated during the training; ``None``: it is not.
    """

    make_model: Callable[[], nn.Module]
    objective: Objective
    stream: Stream
    plan: TrainingPlan
    num_readers: int = 0
    evaluation: Evaluation | None = None

    def require_fitting(self) -> None:
        """Check, before any process is started, for what would fail or hang during the training.

        Raises:
            ConfigError: A batch is larger than the data, the model cannot be divided as the mesh
                asks, batches must not be cut, or recomputation would save no memory.
        """
        spread, mesh = self.plan.spread, self.plan.spread.mesh
        num_parts, size, num_examples = self._num_parts, self.plan.batch_size, len(self.stream)
        if size > num_examples:
            raise ConfigError(
                f"batch_size is {size}, but there are {num_examples} examples, and a batch has no "
                f"example twice; set batch_size to at most {num_examples}"
            )
        loss = self.objective
        if num_parts > 1 and isinstance(loss, CrossEntropy) and loss.class_weights is not None:
            raise ConfigError(
                "class_weights divide the loss of a batch by the weights of its labels, so it "
                f"would differ for a batch in {num_parts} parts; leave class_weights out, or set "
                "replicate, shard and num_micro_batches to 1"
            )
        if num_parts > 1 and not self.objective.per_example:
            raise ConfigError(
                "the loss couples the examples of a batch, so it would differ for a batch in "
                f"{num_parts} parts; set replicate, shard and num_micro_batches to 1"
            )
        # Building a large model takes time, so do it only where a check needs it.
        if num_parts > 1 or mesh.world_size > 1 or spread.recompute:
            module = self.make_model().train()
            if (layer := batch_statistics(module)) is not None:
                self._refuse_statistics(layer, num_parts)
            require_whole(module, mesh)
            if mesh.pipeline > 1:
                self._require_one_input()
            if spread.recompute:
                self._require_saving()

    @property
    def _num_parts(self) -> int:
        """Number of parts in which a batch is computed."""
        return self.plan.spread.mesh.data * self.plan.spread.num_micro_batches

    def require_labels(self, labels: Tensor) -> None:
        """Check that no label is to be ignored if batches are computed in parts.

        Each part's loss is divided by the number of its own labels that count, so the mean over
        parts would differ from the loss of the whole batch.

        Raises:
            DataError: There are labels to ignore.
        """
        weights = example_weights(self.objective, labels).get("loss")
        if self._num_parts == 1 or weights is None or not len(labels):
            return
        if bool((weights < labels.shape[1:].numel()).any()):
            raise DataError(
                f"a batch has labels to ignore, so its loss would differ in {self._num_parts} "
                "parts; leave such examples out, or set replicate, shard and num_micro_batches to "
                "1"
            )

    def _refuse_statistics(self, layer: str, num_parts: int) -> None:
        spread = self.plan.spread
        instead = "use GroupNorm or LayerNorm instead, or set"
        if num_parts > 1:
            raise ConfigError(
                f"{layer} computes with all examples of a batch, so the model would differ for a "
                f"batch in {num_parts} parts; {instead} replicate, shard and num_micro_batches to "
                "1"
            )
        if spread.mesh.pipeline > 1:
            raise ConfigError(
                f"{layer} keeps batch statistics, and a pipeline tries each stage with a batch of "
                f"zeros, which would count; {instead} pipeline to 1"
            )
        if spread.recompute:
            raise ConfigError(
                f"{layer} keeps batch statistics, and recomputation would count each batch twice; "
                f"{instead} recompute to false"
            )

    def _require_saving(self) -> None:
        num_plain, num_recomputing = (
            self._predict_activations(recompute=each) for each in (False, True)
        )
        if num_plain is not None and num_plain == num_recomputing:
            raise ConfigError(
                f"recompute saves nothing: with or without it, a process keeps {num_plain:,} bytes "
                "of activations of this model; set recompute to false, or group the layers of each "
                "part of the model in a module, and these modules in an nn.ModuleList or "
                "nn.Sequential"
            )

    def _predict_activations(self, *, recompute: bool) -> int | None:
        """Predict the most bytes that a process keeps; ``None`` if the model cannot be traced."""
        from fedlearn.parallel.memory import predict  # noqa: PLC0415 (seconds)

        plan = replace(self.plan, spread=replace(self.plan.spread, recompute=recompute))
        features, labels = self.stream.batch(range(1))
        with suppress(ConfigError):  # the model reads the values of tensors
            stages = predict(
                self.make_model, plan, features=features, labels=labels, objective=self.objective
            )
            return max(each.activations or 0 for each in stages)
        return None

    def _require_one_input(self) -> None:
        features, _ = self.stream.batch(range(1))
        try:
            require_single_input(features)
        except DataError as error:
            raise ConfigError(
                f"pipeline is {self.plan.spread.mesh.pipeline}, and a stage takes one tensor, but "
                f"{error}; join the inputs into one, or set pipeline to 1"
            ) from error


@dataclass(frozen=True, kw_only=True)
class Progress:
    """A progress report of a training.

    Attributes:
        step_num: Number of steps taken.
        num_steps: Number of steps of the whole training.
        loss: Mean loss over the examples of the steps since the last report.
        examples_per_s: Throughput since the last report, over all processes.
        learning_rate: Learning rate of the last step.
        loss_scale: Factor that the loss is multiplied by; 1 except with float16.
        num_skipped: Number of steps skipped because gradients overflowed.
        metrics: Metrics of the model after these steps, by name; empty if it was not evaluated.
    """

    step_num: int
    num_steps: int
    loss: float
    examples_per_s: float
    learning_rate: float
    loss_scale: float
    num_skipped: int
    metrics: Mapping[str, float] = field(default_factory=dict)
