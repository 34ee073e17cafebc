"""What is trained, and where a training stands."""

from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor, nn

from fedlearn.algorithms.objectives import CrossEntropy, Objective, example_weights
from fedlearn.core.features import only
from fedlearn.core.improvement import Goal
from fedlearn.core.ranges import Count, Ranged
from fedlearn.errors import ConfigError, DataError
from fedlearn.parallel.parts import require_whole
from fedlearn.parallel.plan import TrainingPlan
from fedlearn.parallel.streams import Stream
from fedlearn.training.example_gradients import batch_statistics


@dataclass(frozen=True, kw_only=True, eq=False)
class TrainingState:
    """Where a training stands: all that it goes on from.

    Attributes:
        model: Parameters and buffers by name.
        optimizer: What the optimiser keeps, by parameter and name: ``"0.weight/exp_avg"``; without
            any it begins anew.
        progress: Steps taken, and of float16 the scale of the loss, the steps since it changed and
            those that were skipped: float64 [4].
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
    """How a training is measured on its way.

    Attributes:
        measure: Returns the metrics of the model, by name; rank 0 alone calls it.
        every: Steps from one evaluation to the next, >= 1; the last step is always evaluated.
        goal: The metric that makes a model the best, and ends the training at its target.
        patience: Evaluations without improvement that end the training, >= 1; ``None``: none do.
    """

    measure: Callable[[TrainingState], Mapping[str, float]]
    every: Count
    goal: Goal
    patience: Count | None = None


@dataclass(frozen=True, kw_only=True, eq=False)
class Task:
    """What is trained: the same in each of its processes.

    Attributes:
        make_model: Builds the network, on the CPU; its initial weights are those of rank 0.
        objective: What is minimised.
        stream: The examples.
        plan: How.
        num_readers: Processes of each rank that read batches ahead, >= 0; 0: the rank reads.
        evaluation: How the model is measured on the way; ``None``: it is not.
    """

    make_model: Callable[[], nn.Module]
    objective: Objective
    stream: Stream
    plan: TrainingPlan
    num_readers: int = 0
    evaluation: Evaluation | None = None

    def require_fitting(self) -> None:
        """Refuse what would end, or hang, in the middle: before any process is started.

        Raises:
            ConfigError: A batch is larger than the data, the model cannot be cut as the mesh asks,
                batches must not be cut, or nothing would be saved by computing blocks again.
        """
        spread, mesh = self.plan.spread, self.plan.spread.mesh
        num_parts, size, num_examples = self._num_parts, self.plan.batch_size, len(self.stream)
        if size > num_examples:
            raise ConfigError(
                f"batch_size is {size}, but there are {num_examples} examples, and a batch has "
                f"none of them twice; set batch_size to {num_examples} at most"
            )
        loss = self.objective
        if num_parts > 1 and isinstance(loss, CrossEntropy) and loss.class_weights is not None:
            raise ConfigError(
                "class_weights divide the loss of a batch by the weights of its labels, and of a "
                f"batch in {num_parts} parts it would be another loss; leave class_weights out, or "
                "set replicate, shard and num_micro_batches to 1"
            )
        if num_parts > 1 and not self.objective.per_example:
            raise ConfigError(
                "the loss couples the examples of a batch, and of a batch in "
                f"{num_parts} parts it would be another loss; set replicate, shard and "
                "num_micro_batches to 1"
            )
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
        """In how many parts a batch is computed."""
        return self.plan.spread.mesh.data * self.plan.spread.num_micro_batches

    def require_labels(self, labels: Tensor) -> None:
        """Refuse labels to ignore where a batch is computed in parts.

        Each part's loss is divided by the number of its own labels that count, so the mean over
        parts would be another loss than that of the batch.

        Raises:
            DataError: There are such labels.
        """
        weights = example_weights(self.objective, labels).get("loss")
        if self._num_parts == 1 or weights is None or not len(labels):
            return
        if bool((weights < labels.shape[1:].numel()).any()):
            raise DataError(
                f"a batch has labels to ignore, and in {self._num_parts} parts its loss would be "
                "another one; leave such examples out, or set replicate, shard and "
                "num_micro_batches to 1"
            )

    def _refuse_statistics(self, layer: str, num_parts: int) -> None:
        spread = self.plan.spread
        instead = "take one with GroupNorm or LayerNorm in its place, or set"
        if num_parts > 1:
            raise ConfigError(
                f"{layer} computes with all examples of a batch, and of a batch in {num_parts} "
                f"parts it would be another model; {instead} replicate, shard and "
                "num_micro_batches to 1"
            )
        if spread.mesh.pipeline > 1:
            raise ConfigError(
                f"{layer} keeps statistics of batches, and a pipeline tries each stage with a "
                f"batch of zeros, which would count; {instead} pipeline to 1"
            )
        if spread.recompute:
            raise ConfigError(
                f"{layer} keeps statistics of batches, and computed again each batch would count "
                f"twice; {instead} recompute to false"
            )

    def _require_saving(self) -> None:
        kept, kept_anyway = (self._activations(recompute=each) for each in (False, True))
        if kept is not None and kept == kept_anyway:
            raise ConfigError(
                f"recompute saves nothing: with it and without, a process keeps {kept:,} bytes of "
                "activations of this model; set recompute to false, or have the layers of each "
                "part of the model in a module of their own, and these in an nn.ModuleList or "
                "nn.Sequential"
            )

    def _activations(self, *, recompute: bool) -> int | None:
        """Return the most bytes that a process keeps; ``None``: the model does not let us know."""
        from fedlearn.parallel.memory import predict  # noqa: PLC0415 (seconds)

        plan = replace(self.plan, spread=replace(self.plan.spread, recompute=recompute))
        features, labels = self.stream.batch(range(1))
        with suppress(ConfigError):  # it asks for values of tensors
            stages = predict(
                self.make_model, plan, features=features, labels=labels, objective=self.objective
            )
            return max(each.activations or 0 for each in stages)
        return None

    def _require_one_input(self) -> None:
        features, _ = self.stream.batch(range(1))
        try:
            only(features)
        except DataError as error:
            raise ConfigError(
                f"pipeline is {self.plan.spread.mesh.pipeline}, and a stage takes one tensor, but "
                f"{error}; join the inputs in one, or set pipeline to 1"
            ) from error


@dataclass(frozen=True, kw_only=True)
class Progress:
    """How far a training is, told now and then.

    Attributes:
        step_num: Steps taken.
        num_steps: Of the training.
        loss: Mean over the examples of the steps since it was last told.
        examples_per_s: Likewise, over all processes.
        learning_rate: Of the last step.
        loss_scale: What the loss is multiplied by; 1 but with float16.
        num_skipped: Steps that were skipped since gradients had overflowed.
        metrics: Of the model after these steps, by name; none where it was not evaluated.
    """

    step_num: int
    num_steps: int
    loss: float
    examples_per_s: float
    learning_rate: float
    loss_scale: float
    num_skipped: int
    metrics: Mapping[str, float] = field(default_factory=dict)
