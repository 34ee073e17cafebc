"""One model that stays in memory and trains one client after another.

Its parameters are views into one flat vector, so loading a global model is one copy and
reading a delta is one subtraction. The engine's sequential executor and a deployed
client's :class:`~fedlearn.client.torch_trainer.TorchTrainer` both train with it, which is
why they agree bit for bit.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from enum import StrEnum

import torch
from torch import Tensor, nn

from fedlearn.algorithms.local import LocalSgd
from fedlearn.algorithms.objectives import Objective, mean_loss
from fedlearn.client.keyed_dropout import (
    KeyedDropouts,
    global_generator,
    step_keys,
    untouched,
)
from fedlearn.core.params import Layout, Params
from fedlearn.core.randomness import Seed


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
        names = [name for name, p in parameters.items() if p.requires_grad]
        self._trainable_names = names

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
        for name, value in self._constants.items():
            value.copy_(params.constants.get(name, value))

    def new_velocity(self) -> list[Tensor]:
        """Return a zero velocity, one tensor per trainable parameter."""
        return [torch.zeros_like(p) for p in self._trainable]

    @property
    def trainable_names(self) -> Sequence[str]:
        """Names of the parameters that training changes, in the order of velocities."""
        return self._trainable_names

    def train(
        self,
        params: Params,
        features: Tensor,
        labels: Tensor,
        batches: Sequence[Tensor],
        *,
        local: LocalSgd,
        velocity: Sequence[Tensor],
        seed: Seed,
    ) -> float:
        """Train from ``params`` on ``batches``; the result is in :attr:`vector_P`.

        Args:
            params: The global model, also the anchor of the proximal term.
            features: Shape [N, ...].
            labels: Shape [N, ...].
            batches: Per step the row numbers to train on.
            local: The update rule.
            velocity: Momentum, updated in place; empty without momentum.
            seed: Of this client in this round: dropout masks and what else is random.

        Returns:
            The mean loss over all examples of all steps, each before its step.
        """
        self.load(params)
        views = params.layout.views(params.vector)
        anchor = [views[name] for name in self._trainable_names] if local.proximal else []
        generator, losses = global_generator(self._device), []
        with untouched(generator):
            for key, rows in zip(step_keys(seed, len(batches)), batches, strict=True):
                self._dropouts.set_key(key)
                generator.manual_seed(key)
                loss = self._loss(features.index_select(0, rows), labels.index_select(0, rows))
                grads = torch.autograd.grad(
                    loss, self._trainable, allow_unused=True, materialize_grads=True
                )
                with torch.no_grad():
                    local.step(self._trainable, grads, anchor=anchor, velocity=velocity)
                losses.append(loss.detach())
        self._rejoin_statistics()
        return _weighted_mean(losses, [len(rows) for rows in batches])

    def _rejoin_statistics(self) -> None:
        """Take over statistics that a forward pass has assigned anew instead of in place."""
        for name, view in self._statistics.items():
            current = self.module.get_buffer(name)
            if current is not view:
                view.copy_(current)
                owner, _, attribute = name.rpartition(".")
                setattr(self.module.get_submodule(owner), attribute, view)

    def _loss(self, features: Tensor, labels: Tensor) -> Tensor:
        if self._precision is Precision.FLOAT32:
            return mean_loss(self._objective, self.module(features), labels)
        with autocast(self._precision, self._device):
            return mean_loss(self._objective, self.module(features), labels)

    @torch.no_grad()
    def measure(
        self, params: Params, features: Tensor, labels: Tensor, *, batch_size: int
    ) -> dict[str, Tensor]:
        """Return the loss and each metric of every example, in evaluation mode: shape [N].

        ``batch_size`` bounds memory and changes nothing else.
        """
        self.load(params)
        self.module.eval()
        parts: dict[str, list[Tensor]] = {}
        for start in range(0, max(1, len(labels)), batch_size):
            part = slice(start, start + batch_size)
            outputs, targets = self.module(features[part]), labels[part]
            parts.setdefault("loss", []).append(self._objective.losses(outputs, targets))
            for name, values in self._objective.metrics(outputs, targets).items():
                parts.setdefault(name, []).append(values)
        self.module.train()
        return {name: torch.cat(values) for name, values in parts.items()}


def _weighted_mean(values: Sequence[Tensor], weights: Sequence[int]) -> float:
    """Return the mean of scalars, weighted, in one transfer from the device."""
    stacked = torch.stack(list(values)).double().cpu()
    return float(stacked @ torch.tensor(weights, dtype=torch.float64)) / sum(weights)
