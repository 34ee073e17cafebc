"""One model that stays in memory and trains one client after another.

Its parameters are views into one flat vector, so loading a global model is one copy and
reading a delta is one subtraction. (Weights of convolutions may lie apart, in a format that is
faster.) The engine's sequential executor and a deployed client's
:class:`~fedlearn.training.torch_trainer.TorchTrainer` both train with it, which is why they agree
bit for bit.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from enum import StrEnum
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.func import functional_call

from fedlearn.algorithms.local import LocalSgd
from fedlearn.algorithms.objectives import Objective, mean_loss
from fedlearn.core.params import Layout, Params
from fedlearn.training import memory_format
from fedlearn.training.keyed_dropout import KeyedDropouts, global_generator, untouched

#: Examples on which a format is tried out, at the most.
_TRIAL_EXAMPLES = 32


class Precision(StrEnum):
    """In which precision the forward and backward pass compute; parameters stay float32."""

    FLOAT32 = "float32"
    BFLOAT16 = "bfloat16"


@contextmanager
def autocast(precision: Precision, device: torch.device) -> Iterator[None]:
    """Run the block under automatic mixed precision where ``precision`` asks for it."""
    if precision is Precision.FLOAT32:
        yield
    else:
        with torch.autocast(device.type, dtype=torch.bfloat16):
            yield


class Part(NamedTuple):
    """Examples that go through the model at once: a whole batch, or a share of one.

    Attributes:
        features: Shape [part, ...].
        labels: Shape [part, ...].
        key: Of this part's dropout masks and what else is random, 32 bits.
    """

    features: Tensor
    labels: Tensor
    key: int


class ResidentModel:
    """A module whose parameters and statistics are views into one vector.

    Attributes:
        module: The module, owned by this object.
        layout: Its layout.
        vector_P: Its parameters and statistics, shape [P].
    """

    def __init__(
        self,
        make_model: Callable[[], nn.Module],
        objective: Objective,
        *,
        device: torch.device,
        precision: Precision,
    ) -> None:
        self.module = make_model()
        self.layout = Layout.of(self.module)
        self.module.to(device=device, dtype=self.layout.dtype).train()
        self._dropouts = KeyedDropouts.install(self.module)
        self._objective, self._device, self._precision = objective, device, precision
        self._generator = global_generator(device)
        self.vector_P = torch.empty(self.layout.size, dtype=self.layout.dtype, device=device)
        views, buffers = self.layout.views(self.vector_P), dict(self.module.named_buffers())
        parameters = dict(self.module.named_parameters())
        for name, view in views.items():
            (parameters | buffers)[name].data = view
        self._constants = {
            name: value for name, value in buffers.items() if name not in self.layout.by_name
        }
        self._statistics = {n: buffers[n] for n in views if n in buffers}
        self._trainable = [p for p in self.module.parameters() if p.requires_grad]
        self._trainable_names = [name for name, p in parameters.items() if p.requires_grad]
        # Weights that lie apart from the vector, beside their places in it; perhaps to be.
        self._apart: list[tuple[nn.Parameter, Tensor]] = []
        self._untried = memory_format.convolution_weights(self.module, device=device)

    def load(self, params: Params) -> None:
        """Take the values of a global model.

        Raises:
            ValueError: It has another layout than the module.
        """
        if params.layout is not self.layout:
            if params.layout != self.layout:
                raise ValueError("the weights are of another model than the one that is resident")
            self.layout = params.layout  # the next comparison is by identity
        self.vector_P.copy_(params.vector)
        self._take_apart()
        for name, value in self._constants.items():
            value.copy_(params.constants.get(name, value))

    def new_velocity(self) -> list[Tensor]:
        """Return a zero velocity, one tensor per trainable parameter."""
        return [torch.zeros_like(p) for p in self._trainable]

    @property
    def device(self) -> torch.device:
        """Where the model is."""
        return self._device

    @property
    def trainable_names(self) -> Sequence[str]:
        """Names of the parameters that training changes, in the order of velocities."""
        return self._trainable_names

    def train(
        self,
        params: Params,
        batches: Iterable[Part],
        *,
        local: LocalSgd,
        velocity: Sequence[Tensor],
    ) -> list[Tensor]:
        """Train from ``params`` batch by batch; the result is in :attr:`vector_P`.

        Args:
            params: The global model, also the anchor of the proximal term.
            batches: Whole ones, one a step.
            local: The update rule.
            velocity: Momentum, updated in place; empty without momentum.

        Returns:
            Each batch's mean loss before its step: scalars.
        """
        anchor = self.anchor(params, local)
        with self.training(params):
            return [
                self.step(
                    [batch],
                    num_examples=len(batch.labels),
                    local=local,
                    anchor=anchor,
                    velocity=velocity,
                )
                for batch in batches
            ]

    def anchor(self, params: Params, local: LocalSgd) -> list[Tensor]:
        """Return the global model's trainable tensors where ``local`` has a use for them."""
        if not local.proximal:
            return []
        views = params.layout.views(params.vector)
        return [views[name] for name in self._trainable_names]

    @contextmanager
    def training(self, params: Params) -> Iterator[None]:
        """Load ``params`` and let the block take steps; its result is in :attr:`vector_P`."""
        self.load(params)
        try:
            with untouched(self._generator):
                yield
        finally:
            self._rejoin()

    def step(
        self,
        parts: Iterable[Part],
        *,
        num_examples: int,
        local: LocalSgd,
        anchor: Sequence[Tensor],
        velocity: Sequence[Tensor],
    ) -> Tensor:
        """Take one step inside :meth:`training`.

        The gradient is the sum over the parts, each weighted by its share of the examples:
        that of the batch's mean loss, however it was cut.

        Args:
            parts: The batch, at least one part; one is in memory at a time.
            num_examples: Examples of all parts together.
            local: The update rule.
            anchor: What :meth:`anchor` returned.
            velocity: Momentum, updated in place; empty without momentum.

        Returns:
            The batch's mean loss before the step, a scalar.
        """
        grads: tuple[Tensor, ...] = ()
        losses: list[Tensor] = []
        for part in parts:
            self._choose_formats(part.features, part.labels)
            self._seed_masks(part.key)
            loss = self._loss(part.features, part.labels)
            if len(part.labels) < num_examples:
                loss = loss * (len(part.labels) / num_examples)
            further = torch.autograd.grad(
                loss, self._trainable, allow_unused=True, materialize_grads=True
            )
            # Two gradients may be one tensor, so the sum is a new one.
            grads = torch._foreach_add(grads, further) if grads else further  # noqa: SLF001 - as torch.optim does
            losses.append(loss.detach())
        with torch.no_grad():
            local.step(self._trainable, grads, anchor=anchor, velocity=velocity)
        return losses[0] if len(losses) == 1 else torch.stack(losses).sum()

    def snapshot(self) -> dict[str, Tensor]:
        """Return what :meth:`restore` continues from: views, which the next step changes."""
        self._rejoin()
        constants = {f"constant.{name}": value for name, value in self._constants.items()}
        return {"vector": self.vector_P, **constants}

    def restore(self, tensors: Mapping[str, Tensor]) -> None:
        """Continue from a :meth:`snapshot`, inside :meth:`training`.

        Raises:
            KeyError: A tensor is missing.
        """
        self.vector_P.copy_(tensors["vector"])
        self._take_apart()
        for name, value in self._constants.items():
            value.copy_(tensors[f"constant.{name}"])

    def _take_apart(self) -> None:
        """Copy what lies apart from the vector out of it."""
        for parameter, place in self._apart:
            parameter.data.copy_(place)

    def _rejoin(self) -> None:
        """Copy what lies apart from the vector into it.

        Statistics are apart when a forward pass has assigned them anew instead of in place.
        """
        for parameter, place in self._apart:
            place.copy_(parameter.data)
        for name, view in self._statistics.items():
            current = self.module.get_buffer(name)
            if current is not view:
                view.copy_(current)
                owner, _, attribute = name.rpartition(".")
                setattr(self.module.get_submodule(owner), attribute, view)

    def _seed_masks(self, key: int) -> None:
        self._dropouts.set_key(key)
        self._generator.manual_seed(key)

    def _choose_formats(self, features: Tensor, labels: Tensor) -> None:
        """Lay out the weights of convolutions as suits them; once, on some first examples."""
        if not self._untried or not len(labels):
            return
        features, labels = features[:_TRIAL_EXAMPLES], labels[:_TRIAL_EXAMPLES]
        buffers = dict(self.module.named_buffers())

        def loss_of(weights: Mapping[str, Tensor]) -> Tensor:
            self._seed_masks(0)
            tensors = {name: value.clone() for name, value in buffers.items()} | dict(weights)
            outputs = functional_call(self.module, tensors, (features,))
            return mean_loss(self._objective, outputs, labels)

        with untouched(self._generator):
            if memory_format.agrees(self._untried, loss_of):
                for parameter in self._untried.values():
                    place = parameter.data
                    parameter.data = memory_format.channels_last(place)
                    self._apart.append((parameter, place))
        self._untried = {}

    def _loss(self, features: Tensor, labels: Tensor) -> Tensor:
        if self._precision is Precision.FLOAT32:
            return mean_loss(self._objective, self.module(features), labels)
        with autocast(self._precision, self._device):
            return mean_loss(self._objective, self.module(features), labels)

    def measure(
        self, params: Params, features: Tensor, labels: Tensor, *, batch_size: int
    ) -> dict[str, Tensor]:
        """Return the loss and each metric of every example, in evaluation mode: shape [N].

        ``batch_size`` bounds memory and changes nothing else.
        """
        slices = (slice(n, n + batch_size) for n in range(0, max(1, len(labels)), batch_size))
        return self.measure_batches(params, ((features[part], labels[part]) for part in slices))

    @torch.no_grad()
    def measure_batches(
        self, params: Params, batches: Iterable[tuple[Tensor, Tensor]]
    ) -> dict[str, Tensor]:
        """Return as :meth:`measure` does; of the examples only one batch is in memory."""
        self.load(params)
        parts: dict[str, list[Tensor]] = {}
        try:
            for features, labels in batches:
                self._choose_formats(features, labels)
                self.module.eval()
                outputs = self.module(features)
                parts.setdefault("loss", []).append(self._objective.losses(outputs, labels))
                for name, values in self._objective.metrics(outputs, labels).items():
                    parts.setdefault(name, []).append(values)
        finally:  # a client whose evaluation failed trains again
            self.module.train()
        return {name: torch.cat(values) for name, values in parts.items()}


def weighted_mean(values: NDArray[np.float64], weights: NDArray[np.int64]) -> float:
    """Return the mean of ``values``, shape [n]: the same bits wherever it is taken."""
    return float(values @ weights.astype(np.float64)) / int(weights.sum())
