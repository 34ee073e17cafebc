"""A model that stays in memory and trains one client after another.

Its parameters are views into one flat vector, so loading a global model is one copy and
computing a delta is one subtraction. The engine's sequential executor and a deployed client's
:class:`~fedlearn.training.torch_trainer.TorchTrainer` both train with it, which is why they agree
bit for bit.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from enum import StrEnum
from functools import partial
from itertools import chain
from typing import NamedTuple, Protocol, TypeAlias, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from fedlearn.algorithms.draws import BEGIN, REPORT, Draws
from fedlearn.algorithms.knn_per import NearestNeighbors, Represented
from fedlearn.algorithms.lanes import Lanes, Over
from fedlearn.algorithms.local import (
    LocalReport,
    LocalUpdate,
    Memory,
    Moment,
    PointGradient,
    Tensors,
    along,
    asks_gradients,
    count_writes,
    extent_of,
    find_affine_step,
    find_client_loss,
    lay_out_broadcast,
    load_client_state,
    make_memory,
    of_one_client,
    refuse_early_loss,
    refuse_noiseless_loss,
    report_of,
    require_asking,
    require_like,
    require_named,
    takes_flat,
)
from fedlearn.algorithms.metrics import Measures, Metric
from fedlearn.algorithms.noised_gradients import TOGETHER, NoisedGradients
from fedlearn.algorithms.objectives import (
    Objective,
    WeightedExamples,
    example_weights,
    mean_loss,
    require_fitting,
)
from fedlearn.algorithms.settings import is_own
from fedlearn.core.features import (
    Features,
    call_module,
    map_inputs,
    require_one_tensor,
    slice_rows,
    split_arguments,
)
from fedlearn.core.model_factory import ModelFactory
from fedlearn.core.params import Layout, Params
from fedlearn.core.randomness import (
    Seed,
    lock_global_generators,
    preserve_global_generators,
    seed_global_generators,
)
from fedlearn.training import memory_format
from fedlearn.training.client_models import (
    BatchOfClient,
    ModelOfClient,
    call_client_loss,
    call_with_output_of,
)
from fedlearn.training.example_gradients import ExampleGradients
from fedlearn.training.functional import functional_call
from fedlearn.training.input_dtypes import InputCast
from fedlearn.training.keyed_dropout import (
    KeyedDropouts,
    example_keys,
    global_generator,
    preserve_generator,
    share_key,
)
from fedlearn.training.lockstep import Lockstep

ValueT = TypeVar("ValueT")

#: Most examples on which a memory format is tried.
_TRIAL_EXAMPLES = 32
#: Memory for per-example gradients that are computed together. One example may exceed it.
_EXAMPLE_BYTES = 64 << 20


class Precision(StrEnum):
    """Precision of the forward and backward pass; parameters stay float32."""

    FLOAT32 = "float32"
    BFLOAT16 = "bfloat16"


@contextmanager
def autocast(precision: Precision, device: torch.device) -> Iterator[None]:
    """Run the block under automatic mixed precision if ``precision`` is bfloat16."""
    if precision is Precision.FLOAT32:
        yield
    else:
        with torch.autocast(device.type, dtype=torch.bfloat16):
            yield


class Part(NamedTuple):
    """Examples that go through the model at once: a whole batch, or a share of one.

    Attributes:
        features: Shape [part, ...], or several such inputs.
        labels: Shape [part, ...].
        key: 32-bit key of the part's dropout masks and other random draws.
        first: If several processes share the part with this key, the number of its examples that
            come before these.
    """

    features: Features
    labels: Tensor
    key: int
    first: int = 0


#: Computes a client's own loss from its model and batch.
LossOf: TypeAlias = Callable[[ModelOfClient, BatchOfClient], Tensor]
#: Reads batches: the parts of each, which may be read again, and its number of examples.
Batches: TypeAlias = Callable[[], Iterable[tuple[Iterable[Part], int]]]


class Gradients(NamedTuple):
    """Gradients of a batch's loss, or one process's contribution to them.

    Attributes:
        by_parameter: One for each trainable parameter; ``None`` if the loss does not depend on it.
        loss: The mean loss of the batch, or this process's contribution to it.
        weight: Total weight of the examples, each 1 unless the loss weighs examples. If the weight
            of the whole batch differs from its number of examples n, gradients and loss must be
            multiplied by n / weight.
    """

    by_parameter: Sequence[Tensor | None]
    loss: Tensor
    weight: Tensor | float


class SetMeasures(NamedTuple):
    """The results of one evaluation pass over a set.

    Attributes:
        by_example: For each measure that is a mean over examples, the value of each: shape [N].
        weights: For each measure with weights, the weight of each example: shape [N]. In the mean
            of any other measure, all examples have the same weight.
        outputs: The model's outputs, [N, ...]; empty unless a measure needs the whole set.
        labels: The labels for these outputs, [N, ...].
    """

    by_example: dict[str, Tensor]
    weights: dict[str, Tensor]
    outputs: Tensor
    labels: Tensor

    def weigh(self) -> dict[str, tuple[Tensor, Tensor]]:
        """Return each example's weight times value, and its weight, by measure: float64 [N]."""
        found = {}
        for name, values in self.by_example.items():
            own = values.double()
            weights = self.weights[name].double() if name in self.weights else torch.ones_like(own)
            # An example of weight 0 may have any value, even NaN, and must not spoil the sum.
            found[name] = torch.where(weights > 0.0, own * weights, 0.0), weights
        return found

    def means(self) -> dict[str, float]:
        """Return the weighted mean of each measure; NaN if all weights are 0."""
        return {n: float(value.sum() / weight.sum()) for n, (value, weight) in self.weigh().items()}


def iter_batches(
    features: Features, labels: Tensor, *, batch_size: int
) -> Iterator[tuple[Features, Tensor]]:
    """Yield copies of batches, because a forward pass may write to its input.

    An empty set still makes one empty batch, from which the measures' names are known.
    """
    for begin in range(0, max(1, len(labels)), batch_size):
        part = slice(begin, begin + batch_size)
        yield map_inputs(torch.clone, slice_rows(features, part)), labels[part].clone()


class ResidentModel:
    """A module whose trained parameters and statistics are views into one vector.

    Attributes:
        module: The module, owned by this object.
        layout: Its layout.
        vector_P: Its trained parameters and statistics, shape [P].
        trainable: The parameters that training changes.
        device: Device of the model.
        measures: The objective's measures and the additional metrics.
        weighs_examples: Whether the loss may weigh examples differently.
        inputs: Converts features to the dtypes that the module accepts.

    Args:
        make_model: Builds the module.
        objective: The loss to minimize and its measures.
        device: Device of the model.
        precision: Precision of the forward and backward pass in training.
        metrics: Additional metrics, by name; ``None``: only the objective's measures.
        memory: Memory for frozen parameters, by name: that of another model of the same function,
            see :attr:`frozen`. Of models that share it, only the one that was loaded last may be
            used. Without it, the model has its own.

    Raises:
        ConfigError: The objective does not declare its measures, a name is malformed or taken, or
            the module is in use elsewhere and cannot be copied.
    """

    def __init__(
        self,
        make_model: Callable[[], nn.Module],
        objective: Objective,
        *,
        device: torch.device,
        precision: Precision,
        metrics: Mapping[str, Metric] | None = None,
        memory: Mapping[str, Tensor] | None = None,
    ) -> None:
        self.measures = Measures(objective, metrics or {})
        with preserve_generator(torch.default_generator):
            self.module = ModelFactory.of(make_model)()
        self.layout = Layout.of(self.module)
        self.module.to(device=device).train()
        self.inputs = InputCast(self.module, self.layout)
        self._dropouts = KeyedDropouts(self.module)
        self.device, self._objective, self._precision = device, objective, precision
        self._generator = global_generator(device)
        self.vector_P = torch.empty(self.layout.size, dtype=self.layout.dtype, device=device)
        views, buffers = self.layout.views(self.vector_P), dict(self.module.named_buffers())
        parameters = dict(self.module.named_parameters())
        saved = self.module.state_dict()  # other buffers are not sent
        self.shapes = {
            name: tuple(value.shape)
            for name, value in (parameters | buffers).items()
            if value.is_floating_point() and name in saved
        }
        # Tensors that cannot be views into the vector, each with its place there: tensors of other
        # dtypes, and convolution weights once they are stored channels last.
        self._of_other_dtypes = list[tuple[Tensor, Tensor]]()
        self._laid_out = list[tuple[Tensor, Tensor]]()
        for name, view in views.items():
            tensor = (parameters | buffers)[name]
            if tensor.dtype == view.dtype:
                # Through .data, so that the module's Parameter objects stay the same.
                tensor.data = view
            else:
                self._of_other_dtypes.append((tensor, view))
        self._frozen = {n: p for n, p in parameters.items() if not p.requires_grad}
        for name, own in self._frozen.items():
            shared = own if memory is None else memory.get(name, own)
            if (shared.shape, shared.dtype) == (own.shape, own.dtype):
                own.data = shared.data
        self._constants = {
            name: value for name, value in buffers.items() if name not in self.layout.by_name
        }
        # Buffers outside the state dict are not part of the model that is sent. Each load resets
        # them, so that one client's values do not reach the next.
        self._unsaved = {n: value.clone() for n, value in buffers.items() if n not in saved}
        self._statistics = {n: buffers[n] for n in views if n in buffers}
        self.trainable: list[Tensor] = [p for p in self.module.parameters() if p.requires_grad]
        self._trainable_stack: list[Tensor] = []
        self._untried = memory_format.convolution_weights(self.module, device=device)
        self._is_objective_tried = False
        self.weighs_examples = isinstance(objective, WeightedExamples)
        self._by_example: ExampleGradients | None = None

    @property
    def frozen(self) -> Mapping[str, Tensor]:
        """The frozen parameters, by name."""
        return self._frozen

    def load(self, params: Params) -> None:
        """Load the values of a global model.

        Raises:
            ValueError: The global model has a different layout than the module.
        """
        params = params.complete()  # with initial values where clients have their own
        if params.layout is not self.layout:
            if params.layout != self.layout:
                raise ValueError("the weights belong to another model than the resident one")
            self.layout = params.layout  # the next comparison is by identity
        self.vector_P.copy_(params.vector)
        self._take_apart()
        for name, tensor in (self._frozen | self._constants).items():
            tensor.data.copy_(params.constants.get(name, self._unsaved.get(name, tensor.data)))

    def share_memory(self, features: Features, labels: Tensor) -> None:
        """Move the parameters into memory that forks of this process share with it.

        Args:
            features: Features of a few examples, on which memory formats are tried: [n, ...].
            labels: Their labels: [n, ...].
        """
        self._choose_formats(features, labels)
        for tensor in (self.vector_P, *(each.data for each in self.module.parameters())):
            tensor.share_memory_()

    @property
    def _apart(self) -> list[tuple[Tensor, Tensor]]:
        return self._of_other_dtypes + self._laid_out

    @property
    def trainable_stack(self) -> Sequence[Tensor]:
        """Views of the trainable parameters as a stack of one client: [1, ...] each."""
        if not self._trainable_stack:
            self._trainable_stack = [value.detach().unsqueeze(0) for value in self.trainable]
        return self._trainable_stack

    def use_contiguous_weights(self) -> None:
        """Undo channels last for good, for update rules that need contiguous weights.

        A custom rule may write through a view such as ``value.view(K, -1)``, which does not exist
        for a channels-last weight.
        """
        self._untried = {}
        for tensor, place in self._laid_out:
            place.copy_(tensor.data)
            tensor.data = place
        self._laid_out = []
        self._trainable_stack.clear()

    @contextmanager
    def restoring_generator(self) -> Iterator[None]:
        """Restore the global generator after the block, in which other threads may draw.

        Not :func:`preserve_generator`, which would block them, also while they share this one's
        batches.
        """
        with lock_global_generators():
            state = self._generator.get_state()
        try:
            yield
        finally:
            with lock_global_generators():
                self._generator.set_state(state)

    @contextmanager
    def training(self, params: Params) -> Iterator[None]:
        """Load a global model for the block to train; the result is in :attr:`vector_P`.

        Raises:
            ValueError: The global model has a different layout than the module.
        """
        self.load(params)
        try:
            # Other threads may draw between the steps, since each step seeds the generator again.
            with self.restoring_generator():
                yield
        finally:
            self._rejoin()

    def gradients(
        self,
        parts: Iterable[Part],
        *,
        num_examples: int,
        point: Sequence[Tensor] | None = None,
        loss_of: LossOf | None = None,
    ) -> Gradients:
        """Compute the gradients of one batch's mean loss, and that loss.

        The parts are weighted by their share of the examples and summed, so that the result is the
        gradient of the batch's mean loss, however the batch was cut.

        Args:
            parts: The batch, with one part in memory at a time. A loss that couples examples needs
                the batch as one part. If the parts are only a share of the batch, or none of it,
                gradients and loss are the contribution of that share.
            num_examples: Number of examples in the whole batch.
            point: Values of :attr:`trainable` at which to compute them, without a change to the
                module's statistics; ``None``: the current ones.
            loss_of: A loss in place of the objective's; the batch must be one part then.
        """
        grads: Sequence[Tensor | None] = ()
        losses = list[Tensor]()
        leaves = self.trainable
        if point is not None:
            leaves = [value.detach().requires_grad_() for value in point]
        weight: Tensor | float = 0.0
        for part in parts:
            self._choose_formats(part.features, part.labels)
            with lock_global_generators():
                self._seed_masks(part)
                at = None if point is None else leaves
                loss = self._compute_loss(part.features, part.labels, at=at, loss_of=loss_of)
                weighs: Tensor | float = float(len(part.labels))
                # A whole batch is not scaled, so that it keeps the bits of plain training.
                if len(part.labels) < num_examples:
                    own = example_weights(self._objective, part.labels).get("loss")
                    if own is not None:  # an example's weight is the mean over its positions
                        weighs = own.double().sum() / part.labels.shape[1:].numel()
                    loss = loss * torch.as_tensor(weighs / num_examples).to(loss)
                further = torch.autograd.grad(loss, leaves, allow_unused=True)
            weight = weight + weighs
            grads = list(map(_add_gradients, grads, further)) if grads else further
            losses.append(loss.detach())
        if not losses:
            return Gradients([None] * len(self.trainable), self.vector_P.new_zeros(()), 0.0)
        loss = losses[0] if len(losses) == 1 else torch.stack(losses).sum()
        return Gradients(grads, loss, weight)

    def compute_noised_gradients(
        self,
        parts: Iterable[Part],
        *,
        num_examples: int,
        rule: NoisedGradients,
        together: Lockstep | None = None,
    ) -> tuple[Sequence[Tensor], Tensor]:
        """Compute the mean of the clipped per-example gradients, with noise, and the mean loss.

        A parameter that the loss does not depend on gets noise all the same, since the absence of
        noise could reveal something about an example.

        Args:
            parts: See :meth:`gradients`.
            num_examples: Number of examples in the whole batch.
            rule: Clips the gradients and adds the noise.
            together: Sums over the processes that share the batch. The process of rank 0 draws the
                noise, once for the whole sum. ``None``: there is only this process.

        Raises:
            SettingsRefused: Examples have no gradients of their own: see
                :class:`~fedlearn.training.example_gradients.ExampleGradients`.
        """
        if self._by_example is None:
            self._by_example = ExampleGradients(
                self.module, self._objective, dropouts=self._dropouts
            )
        stack = self.trainable_stack
        sums = [torch.zeros_like(value, dtype=torch.float64) for value in stack]
        total = sums[0].new_zeros(())
        size = sum(value.numel() for value in stack)
        num_together = min(TOGETHER, max(1, _EXAMPLE_BYTES // (self.vector_P.itemsize * size)))
        for part in parts:
            with lock_global_generators():
                self._seed_masks(part)
                # Keys follow an example's place in the whole batch, however the batch is cut.
                places = torch.arange(len(part.labels), device=self.device) + part.first
                keys, features = example_keys(part.key, places), self.inputs(part.features)
                for first in range(0, len(places), num_together):
                    now = slice(first, first + num_together)
                    with autocast(self._precision, self.device):
                        grads, losses = self._by_example(
                            slice_rows(features, now), part.labels[now], keys=keys[now]
                        )
                    is_real = torch.ones(1, len(losses), dtype=torch.bool, device=self.device)
                    clipped = rule.clip([grad.unsqueeze(0) for grad in grads], is_real)
                    for value, more in zip(sums, clipped, strict=True):
                        value.add_(more)
                    total += losses.sum(dtype=torch.float64)
        return self._add_noise(sums, total, num_examples=num_examples, rule=rule, together=together)

    def _add_noise(
        self,
        sums: list[Tensor],
        total: Tensor,
        *,
        num_examples: int,
        rule: NoisedGradients,
        together: Lockstep | None,
    ) -> tuple[Sequence[Tensor], Tensor]:
        """Add up clipped gradients over the processes, add noise, and return mean and mean loss.

        Args:
            sums: This process's sums of clipped gradients, float64 [1, ...] for each parameter.
            total: This process's sum of losses.
            num_examples: Number of examples in the whole batch.
            rule: Adds the noise.
            together: See :meth:`compute_noised_gradients`.
        """
        if together is None:
            noised = rule.add_noise(sums, [num_examples], like=self.trainable_stack)
            return [grad[0] for grad in noised], total / num_examples
        # Two sums: the clipped gradients, then the noised result, because rank 0 alone draws the
        # noise and all must take the same step.
        whole, total, _ = together.sum_gradients([each[0] for each in sums], total, weight=0.0)
        own: Sequence[Tensor | None] = [None] * len(whole)
        if together.processes.rank == 0:
            clipped = [each.unsqueeze(0) for each in whole if each is not None]  # none is None
            noised = rule.add_noise(clipped, [num_examples], like=self.trainable_stack)
            own = [grad[0] for grad in noised]
        grads, *_ = together.sum_gradients(own, torch.zeros_like(total), weight=0.0)
        return [grad for grad in grads if grad is not None], total / num_examples

    def snapshot(self) -> dict[str, Tensor]:
        """Return the state for :meth:`restore`, as views that the next step changes."""
        self._rejoin()
        constants = {f"constant.{name}": value for name, value in self._constants.items()}
        return {"vector": self.vector_P, **constants}

    def restore(self, tensors: Mapping[str, Tensor]) -> None:
        """Load a :meth:`snapshot`, inside :meth:`training`.

        Raises:
            KeyError: A tensor is missing.
        """
        self.vector_P.copy_(tensors["vector"])
        self._take_apart()
        for name, value in self._constants.items():
            value.copy_(tensors[f"constant.{name}"])

    def _take_apart(self) -> None:
        """Copy values from the vector into the tensors that are not views into it."""
        for tensor, place in self._apart:
            tensor.data.copy_(place)

    def _rejoin(self) -> None:
        """Copy values of the tensors that are not views into the vector back into it.

        Statistics are no longer views when a forward pass has assigned a new tensor instead of
        writing in place; this makes them views again.
        """
        for name, buffer in self._statistics.items():
            current = self.module.get_buffer(name)
            if current is not buffer:
                buffer.copy_(current)
                owner, _, attribute = name.rpartition(".")
                setattr(self.module.get_submodule(owner), attribute, buffer)
        for tensor, place in self._apart:
            place.copy_(tensor.data)

    def _seed_masks(self, part: Part) -> None:
        self._dropouts.set_key(part.key, first=part.first, num_rows=len(part.labels))
        self._generator.manual_seed(share_key(part.key, part.first))

    def _choose_formats(self, features: Features, labels: Tensor) -> None:
        """Choose the memory format of convolution weights, once, by a trial on a few examples."""
        if not self._untried or not len(labels):
            return
        first = slice(_TRIAL_EXAMPLES)
        some, labels = self.inputs(slice_rows(features, first)), labels[first]
        buffers = dict(self.module.named_buffers())

        def loss_of(weights: Mapping[str, Tensor]) -> Tensor:
            self._seed_masks(Part(some, labels, 0))
            tensors = {name: value.clone() for name, value in buffers.items()} | dict(weights)
            # A clone: a forward pass may write to its inputs.
            inputs = split_arguments(map_inputs(torch.clone, some))
            outputs = require_one_tensor(functional_call(self.module, tensors, *inputs))
            return mean_loss(self._objective, outputs, labels)

        with preserve_generator(self._generator):
            if memory_format.agrees(self._untried, loss_of):
                for parameter in self._untried.values():
                    place = parameter.data
                    parameter.data = memory_format.channels_last(place)
                    if parameter.requires_grad:
                        self._laid_out.append((parameter, place))
                self._trainable_stack.clear()
        self._untried = {}

    def _compute_loss(
        self,
        features: Features,
        labels: Tensor,
        *,
        at: Sequence[Tensor] | None,
        loss_of: LossOf | None,
    ) -> Tensor:
        features = self.inputs(features)
        if self._precision is Precision.FLOAT32:
            return self._loss_at(features, labels, at=at, loss_of=loss_of)
        with autocast(self._precision, self.device):
            return self._loss_at(features, labels, at=at, loss_of=loss_of)

    def _loss_at(
        self,
        features: Features,
        labels: Tensor,
        *,
        at: Sequence[Tensor] | None,
        loss_of: LossOf | None,
    ) -> Tensor:
        if loss_of is None:
            return self._loss_of(self._call(features, at), labels)
        model = ModelOfClient(
            module=self.module,
            forward=lambda inputs, tensors: self._call(inputs, at if tensors is None else tensors),
        )
        objective = partial(self._loss_of, labels=labels)
        return loss_of(model, BatchOfClient(features=features, labels=labels, objective=objective))

    def _call(self, features: Features, at: Sequence[Tensor] | None) -> Tensor:
        """Run the module, at other parameters if given; its buffers do not change then."""
        if at is None:
            return call_module(self.module, features)
        tensors = {name: value.clone() for name, value in self.module.named_buffers()}
        tensors |= {spec.name: value for spec, value in zip(self.layout.trainable, at, strict=True)}
        outputs = functional_call(self.module, tensors, *split_arguments(features))
        return require_one_tensor(outputs)

    def _loss_of(self, outputs: Tensor, labels: Tensor) -> Tensor:
        if not self._is_objective_tried and len(labels) > 1:
            self._try_objective(outputs, labels)
        return mean_loss(self._objective, outputs, labels)

    def _try_objective(self, outputs: Tensor, labels: Tensor) -> None:
        """Check the objective on a first batch, without moving the generator that the step uses."""
        with torch.no_grad(), preserve_generator(self._generator):
            require_fitting(self._objective, outputs, labels)
        self._is_objective_tried = True

    def measure(
        self, params: Params, features: Features, labels: Tensor, *, batch_size: int
    ) -> SetMeasures:
        """Measure the model on examples in memory, in evaluation mode.

        ``batch_size`` bounds memory and changes nothing else.

        Raises:
            ValueError: The objective does not return what it declares.
        """
        batches = iter_batches(features, labels, batch_size=batch_size)
        return self.measure_batches(params, batches)

    @torch.no_grad()
    def measure_with_neighbors(
        self,
        params: Params,
        neighbors: NearestNeighbors,
        *,
        stored: Iterable[tuple[Features, Tensor]],
        evaluated: Iterable[tuple[Features, Tensor]] | None,
    ) -> SetMeasures:
        """Measure the model with the vote of a client's nearest training examples.

        The outputs and representations of all examples are held in memory.

        Args:
            params: The model.
            neighbors: How they vote.
            stored: The training examples, in batches.
            evaluated: The examples to measure on; ``None``: the training examples themselves.

        Raises:
            ValueError: There is no such submodule, or it is no classification.
        """
        self.load(params)
        self.module.eval()
        try:
            memory = self._represent(stored, neighbors.representation)
            found = memory
            if evaluated is not None:
                found = self._represent(evaluated, neighbors.representation)
        finally:  # also after an error: the client may train again
            self.module.train()
        outputs = neighbors.vote(found, memory, is_same=evaluated is None)
        by_example = self.measures.by_example(outputs, found.labels)
        by_weight = example_weights(self._objective, found.labels)
        return SetMeasures(dict(by_example), dict(by_weight), outputs, found.labels)

    def _represent(self, batches: Iterable[tuple[Features, Tensor]], name: str) -> Represented:
        parts = list[Represented]()
        for features, labels in batches:
            call = partial(call_module, self.module, self.inputs(features))
            parts.append(Represented(*call_with_output_of(self.module, name, call), labels))
        outputs, representations, labels = (
            torch.cat(column) for column in zip(*parts, strict=True)
        )
        return Represented(outputs, representations, labels)

    @torch.no_grad()
    def measure_batches(
        self, params: Params, batches: Iterable[tuple[Features, Tensor]]
    ) -> SetMeasures:
        """Measure the model on batches, like :meth:`measure`, with one in memory at a time.

        If a measure needs the whole set, the outputs of all examples are held in memory, too.
        """
        self.load(params)
        parts: dict[str, list[Tensor]] = {}
        weights: dict[str, list[Tensor]] = {}
        kept: list[tuple[Tensor, Tensor]] = []
        try:
            for features, labels in batches:
                # Before eval(), since formats are tried in training mode.
                self._choose_formats(features, labels)
                self.module.eval()
                outputs = call_module(self.module, self.inputs(features))
                if not kept:
                    self._try_objective(outputs, labels)
                for name, values in self.measures.by_example(outputs, labels).items():
                    parts.setdefault(name, []).append(values)
                for name, own in example_weights(self._objective, labels).items():
                    weights.setdefault(name, []).append(own)
                # Outputs are kept only if a measure needs the whole set.
                size = None if self.measures.needs_whole_sets else 0
                kept.append((outputs[:size], labels[:size]))
        finally:  # also after an error: the client may train again
            self.module.train()
        whole = [torch.cat(column) for column in zip(*kept, strict=True)]
        by_example, by_weight = (
            {name: torch.cat(values) for name, values in each.items()} for each in (parts, weights)
        )
        return SetMeasures(by_example, by_weight, *whole)


@dataclass(frozen=True, kw_only=True, eq=False)
class ClientRound:
    """One client's part in a round.

    Attributes:
        client_id: The client.
        seed: Seed of the local update's draws, from
            :func:`~fedlearn.algorithms.draws.client_seed`.
        num_steps: Number of steps that it takes.
        steps_per_epoch: Number of batches in an epoch.
        read_epoch: Reads the first epoch's batches: the parts of each, and its number of examples.
    """

    client_id: int
    seed: Seed
    num_steps: int
    steps_per_epoch: int
    read_epoch: Batches


class Training:
    """Trains clients one after another from the same global model with the same local update.

    Args:
        model: The model to train.
        params: The global model.
        local: The local update that each client runs.
        broadcast: What the strategy broadcasts along with the model, by name: one vector each.
        round_num: Round index.
        together: Sums gradients over the processes that share the training; ``None``: there is
            only this process.

    Attributes:
        memory: What the local update remembers from step to step: tensors of one row.
        num_steps: Steps taken so far; set it to continue from a snapshot.

    Raises:
        ValueError: A vector's length differs from the model's.
    """

    def __init__(
        self,
        model: ResidentModel,
        params: Params,
        *,
        local: LocalUpdate,
        broadcast: Lanes,
        round_num: int,
        together: Lockstep | None = None,
    ) -> None:
        self._model, self._params, self._together = model, params, together
        self._add_noise = local if isinstance(local, NoisedGradients) else None
        self._local = local if self._add_noise is None else self._add_noise.inner
        self._round_num, self._short_cut = round_num, find_affine_step(self._local)
        self._takes_any_layout = takes_flat(self._local)
        self._client_loss, self._asks = find_client_loss(local), asks_gradients(local)
        if not self._takes_any_layout:
            model.use_contiguous_weights()
        specs = self._local.broadcasts
        laid_out = lay_out_broadcast(broadcast, specs, layout=params.layout, params_P=params.vector)
        self._broadcast: Memory = {
            name: [value.to(x.dtype) for value, x in zip(values, model.trainable, strict=True)]
            if extent_of(name, specs) is Over.TRAINABLE  # the model is, too
            else values
            for name, values in laid_out.items()
        }
        self._is_own = is_own(local)
        self._client: ClientRound  # see `client`
        self._draws = Draws(self._local, ())
        self.memory = make_memory(local, model.trainable_stack, client_state={})
        self.num_steps = 0
        self._does_step: bool | None = None  # unknown

    @contextmanager
    def client(self, client_state: Mapping[str, Tensor], *, client: ClientRound) -> Iterator[None]:
        """Prepare one client's training, whose steps the block takes.

        The client starts from the global model, and its result is in the model's vector.

        Args:
            client_state: The client's state from its last round: by name one row, shape [1, n].
            client: The client and its batches.

        Raises:
            ValueError: The global model has a different layout than the module.
        """
        load_client_state(self._local, self.memory, client_state=client_state)
        self.num_steps = 0
        self._client, self._draws = client, Draws(self._local, [client.seed])
        with ExitStack() as restored:
            if self._is_own:
                restored.enter_context(preserve_global_generators())
                restored.enter_context(preserve_generator(torch.default_generator))
            restored.enter_context(self._model.training(self._params))
            with torch.no_grad():
                self._draw(BEGIN)
                self._local.begin(
                    self._model.trainable_stack,
                    self.memory,
                    broadcast=self._broadcast,
                    moment=self._moment(client.read_epoch, loss=refuse_early_loss),
                )
            yield

    def _draw(self, step: int) -> None:
        """Make the draws that the local update declares, and seed generators for custom code."""
        self._draws.fill(self.memory, step)
        if self._is_own:
            seed_global_generators(self._client.seed.at(step))

    def step(self, parts: Iterable[Part], *, num_examples: int) -> Tensor:
        """Take one step; return the batch's mean loss before it, a scalar.

        Args:
            parts: The batch, whole or cut; with several processes, this process's share. Read once
                more for each further gradient that the local update asks for.
            num_examples: Number of examples in the whole batch.
        """
        if self._add_noise is not None:
            with torch.no_grad():
                noised, loss = self._model.compute_noised_gradients(
                    parts, num_examples=num_examples, rule=self._add_noise, together=self._together
                )
                self._update(noised, lambda: (), loss=refuse_noiseless_loss)
        else:
            if self._client_loss is not None:
                with torch.no_grad():
                    self._draw(self.num_steps)
            grads, loss = self._gradients(parts, num_examples=num_examples)
            with torch.no_grad():
                self._update(grads, lambda: [(parts, num_examples)], loss=lambda: loss)
        self.num_steps += 1
        return loss

    def _gradients(
        self, parts: Iterable[Part], *, num_examples: int, point: Sequence[Tensor] | None = None
    ) -> tuple[Sequence[Tensor | None], Tensor]:
        """Compute a batch's gradients and mean loss, over all processes that share it."""
        if self._asks:  # a forward pass may write to its inputs, which are needed again
            parts = map(_copy_part, parts)
        loss_of = None if self._client_loss is None else self._compute_client_loss
        grads, loss, weight = self._model.gradients(
            parts, num_examples=num_examples, point=point, loss_of=loss_of
        )
        with torch.no_grad():
            if self._together is not None:
                grads, loss, weight = self._together.sum_gradients(grads, loss, weight=weight)
            if isinstance(weight, Tensor) and self._model.weighs_examples:
                # The mean divides by the total weight of the batch, which is known only now
                # that all parts and processes are summed.
                factor = torch.where(weight > 0.0, num_examples / weight, 0.0).to(loss.dtype)
                grads = [None if grad is None else grad * factor for grad in grads]
                loss = loss * factor
        return grads, loss

    def _compute_client_loss(self, model: ModelOfClient, batch: BatchOfClient) -> Tensor:
        """Compute the local update's own loss."""
        assert self._client_loss is not None
        return call_client_loss(
            self._client_loss,
            model,
            batch,
            memory=of_one_client(self.memory),
            broadcast=of_one_client(self._broadcast),
            moment=Moment(self._round_num, self.num_steps),
        )

    def _update(
        self,
        grads: Sequence[Tensor | None],
        batches: Batches,
        *,
        loss: Callable[[], Tensor],
    ) -> None:
        """Update the parameters that have a gradient; as in torch.optim, leave the others alone."""
        own = [grad for grad in grads if grad is not None]
        is_whole = len(own) == len(grads)
        affine = None
        if self._short_cut is not None:
            affine = self._short_cut(self._moment(batches, loss=loss))
        if affine is not None and affine.is_plain:
            reached = (
                self._model.trainable if is_whole else _select_reached(self._model.trainable, grads)
            )
            # x <- x + scale * g: plain SGD in one call for all tensors.
            torch._foreach_add_(reached, own, alpha=affine.scale)
            return
        self._draw(self.num_steps)
        x: Tensors = self._model.trainable_stack
        memory: Memory = self.memory
        broadcast = self._broadcast
        places = None
        if not is_whole:
            places = _select_reached(range(len(grads)), grads)
            x, broadcast = _select_reached(x, grads), along(broadcast, places)
            memory = along(memory, places)
        if not self._takes_any_layout:
            own = [grad.contiguous() for grad in own]
        self._step(
            x,
            [grad.unsqueeze(0) for grad in own],
            memory,
            broadcast=broadcast,
            moment=self._moment(batches, loss=loss, places=places),
        )

    def _moment(
        self,
        batches: Batches,
        *,
        loss: Callable[[], Tensor],
        places: Sequence[int] | None = None,
    ) -> Moment:
        info = _ClientInfo(
            client=self._client,
            step=self.num_steps,
            local=self._local,
            model=self._model,
            gradients=self._gradients,
            batches=batches,
            loss=loss,
            places=places,
        )
        return Moment(self._round_num, self.num_steps, info=info)

    def _step(
        self, x: Tensors, grads: Tensors, memory: Memory, *, broadcast: Memory, moment: Moment
    ) -> None:
        """Call the rule's step, and note whether it wrote to anything.

        A custom rule may return new tensors by mistake, instead of writing to its arguments.
        :meth:`report` turns that into an error.
        """
        touched = [] if self._does_step else [*x, *chain.from_iterable(memory.values())]
        before = count_writes(touched)
        self._local.step(x, grads, memory, broadcast=broadcast, moment=moment)
        self._does_step = self._does_step or not x or count_writes(touched) > before

    @property
    def remembered(self) -> Memory:
        """The memory without draws: the part that a snapshot must contain."""
        specs = self._local.memory
        return {name: own for name, own in self.memory.items() if specs[name].draws is None}

    @torch.no_grad()
    def report(self, *, mean_loss: Callable[[], float]) -> LocalReport:
        """Return the lanes that a client sends with its delta, and its state for the next round.

        Args:
            mean_loss: Computes the mean loss of the client's steps, by examples.

        Raises:
            ValueError: The local update's steps changed nothing.
        """
        if self._does_step is False:
            raise ValueError(
                f"{type(self._local).__name__}.step changes nothing: it must write to the tensors "
                "x in place, for example with value.sub_(...); a returned value, or a tensor put "
                "into the list, is not used"
            )
        self._draw(REPORT)
        is_noised = self._add_noise is not None
        return report_of(
            self._local,
            self._model.trainable_stack,
            self.memory,
            broadcast=self._broadcast,
            moment=self._moment(
                self._client.read_epoch,
                loss=lambda: (
                    refuse_noiseless_loss()
                    if is_noised
                    else self._model.vector_P.new_tensor(mean_loss())
                ),
            ),
            layout=self._model.layout,
        )


class _ComputeGradients(Protocol):
    """Computes the gradients and the mean loss of a batch at other parameters."""

    def __call__(
        self, parts: Iterable[Part], *, num_examples: int, point: Sequence[Tensor]
    ) -> tuple[Sequence[Tensor | None], Tensor]: ...


class _ClientInfo(NamedTuple):
    """What is known about a step of one client; see :class:`~fedlearn.algorithms.local.Moment`.

    Attributes:
        client: The client.
        step: Number of steps that it has taken.
        local: The local update.
        model: The model.
        gradients: Computes a batch's gradients.
        batches: Reads the batches to which :meth:`gradient_at` refers.
        loss: Computes the mean loss.
        places: Places in the model of the parameters in ``x``; ``None``: all.
    """

    client: ClientRound
    step: int
    local: LocalUpdate
    model: ResidentModel
    gradients: _ComputeGradients
    batches: Batches
    loss: Callable[[], Tensor]
    places: Sequence[int] | None

    @property
    def client_ids(self) -> Sequence[int]:
        return [self.client.client_id]

    @property
    def names(self) -> Sequence[str]:
        require_named(self.local)
        specs = self.model.layout.trainable
        return [specs[place].name for place in self._own_places]

    @property
    def epochs_K(self) -> Tensor:
        epoch = self.step // self.client.steps_per_epoch
        return torch.tensor([epoch], device=self.model.device)

    @property
    def num_steps_K(self) -> Tensor:
        return self.model.vector_P.new_full((1,), float(self.client.num_steps))

    @property
    def losses_K(self) -> Tensor:
        return self.loss().to(self.model.vector_P.dtype).reshape(1)

    def gradient_at(self, point: Tensors) -> PointGradient:
        require_asking(self.local)
        places, values = self._own_places, [value[0] for value in self.model.trainable_stack]
        require_like(point, [self.model.trainable_stack[place] for place in places])
        for place, value in zip(places, point, strict=True):
            values[place] = value[0]
        sums = [torch.zeros_like(values[place]) for place in places]
        loss, total = self.model.vector_P.new_zeros(()), 0
        with torch.enable_grad(), self.model.restoring_generator():
            for parts, num_examples in self.batches():
                grads, own = self.gradients(parts, num_examples=num_examples, point=values)
                total += num_examples
                share = num_examples / total
                loss = torch.lerp(loss, own.detach().to(loss.dtype), share)
                for value, place in zip(sums, places, strict=True):
                    grad = grads[place]
                    value.lerp_(torch.zeros_like(value) if grad is None else grad, share)
        return PointGradient(loss.reshape(1), [value.unsqueeze(0) for value in sums])

    @property
    def _own_places(self) -> Sequence[int]:
        return range(len(self.model.trainable)) if self.places is None else self.places


def _copy_part(part: Part) -> Part:
    return part._replace(features=map_inputs(torch.clone, part.features))


def _select_reached(values: Sequence[ValueT], grads: Sequence[Tensor | None]) -> list[ValueT]:
    """Select the values of those parameters that have a gradient."""
    return [value for value, grad in zip(values, grads, strict=True) if grad is not None]


def _add_gradients(one: Tensor | None, other: Tensor | None) -> Tensor | None:
    """Add two gradients, ``None`` being zero, into a new tensor."""
    if one is None or other is None:
        return other if one is None else one
    return one + other  # not in place: autograd may return one tensor for two parameters


def weighted_mean(values: NDArray[np.float64], weights: NDArray[np.int64]) -> float:
    """Return the weighted mean of ``values``, shape [n], with the same bits in every executor."""
    return float(values @ weights.astype(np.float64)) / int(weights.sum())
