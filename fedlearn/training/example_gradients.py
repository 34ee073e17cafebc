"""Per-example gradients, for differentially private training.

A ``vmap`` over the batch sends each example through the model alone, so that its gradient depends
on no other example. Models that ``vmap`` does not support, such as those that read lengths or
branch on a value, process one example after another. Buffers are left unchanged, because what a
model accumulates there would leave the client without noise.
"""

import warnings
from collections.abc import Mapping

import torch
from torch import Tensor, nn
from torch.func import grad_and_value, vmap

from fedlearn.algorithms.objectives import Objective, why_not_by_example
from fedlearn.core.features import (
    Features,
    map_inputs,
    require_one_tensor,
    slice_rows,
    split_arguments,
)
from fedlearn.core.randomness import Seed, preserve_global_generators, seed_global_generators
from fedlearn.errors import SettingsRefused
from fedlearn.training.functional import functional_call
from fedlearn.training.keyed_dropout import (
    KeyedDropouts,
    describe_layer,
    global_generator,
    preserve_generator,
)
from fedlearn.training.recurrent_layers import batch_hidden_states

Named = dict[str, Tensor]

#: Further passes over the first batch, if another thread may have drawn during each one before.
_MOST_PASSES = 8

_REMEDY = "use a model that treats each example separately, with GroupNorm or LayerNorm instead"


def batch_statistics(module: nn.Module) -> str | None:
    """Return the name, for messages, of the first layer that uses batch statistics, if any.

    Example:
        >>> batch_statistics(nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2)))
        'layer 1 (BatchNorm1d)'
        >>> batch_statistics(nn.GroupNorm(1, 2)) is None
        True
    """
    for name, layer in module.named_modules():
        normalizes = isinstance(layer, nn.modules.batchnorm._NormBase)  # noqa: SLF001 - of all of them
        is_by_example = isinstance(layer, nn.modules.instancenorm._InstanceNorm)  # noqa: SLF001
        if normalizes and layer.training and not (is_by_example and not layer.track_running_stats):
            return describe_layer(name, layer)
    return None


def require_separable(module: nn.Module, objective: Objective) -> None:
    """Check that neither the loss nor a layer is known to couple the examples of a batch.

    Raises:
        SettingsRefused: The loss couples them, or a layer does; the message names it.
    """
    if (reason := why_not_by_example(objective)) is not None:
        raise SettingsRefused(reason)
    if (layer := batch_statistics(module)) is not None:
        raise SettingsRefused(
            f"{layer} computes with all examples of a batch, so there are no per-example "
            f"gradients to clip; {_REMEDY}"
        )


class ExampleGradients:
    """Computes the gradient of a model's loss for each example of a batch.

    Args:
        module: The model; each call uses the parameters and buffers it has at that time.
        objective: The loss.
        dropouts: The dropout layers of the module.

    Raises:
        SettingsRefused: The loss, or a layer by its type, couples the examples of a batch.
    """

    def __init__(self, module: nn.Module, objective: Objective, *, dropouts: KeyedDropouts) -> None:
        require_separable(module, objective)
        batch_hidden_states(module)
        self._module, self._objective, self._dropouts = module, objective, dropouts
        self._is_tried, self._is_vectorized = False, True

    def __call__(
        self, features: Features, labels: Tensor, *, keys: Tensor
    ) -> tuple[list[Tensor], Tensor]:
        """Return each example's gradient, [b, ...] per trainable parameter, and loss, [b].

        Args:
            features: Shape [b, ...], or several such inputs.
            labels: Shape [b, ...].
            keys: Dropout key of each example: int64 [b].

        Raises:
            SettingsRefused: An example's loss depends on the others in its batch, or the forward
                pass changes a buffer of floating-point numbers or keeps state between calls.
        """
        if not self._is_tried and len(labels) > 1:
            self._try(features, labels)
        if self._is_vectorized:
            try:
                return self._compute_batched(features, labels, keys)
            except Exception:  # noqa: BLE001 - a custom forward pass meets vmap
                found = self._compute_singly(features, labels, keys)
            self._is_vectorized = False  # the forward pass works, but not under vmap
            return found
        return self._compute_singly(features, labels, keys)

    def _split_parameters(self) -> tuple[Named, Named]:
        """Return the trainable parameters, detached, and the frozen ones."""
        parameters = dict(self._module.named_parameters())
        trainable = {name: p.detach() for name, p in parameters.items() if p.requires_grad}
        return trainable, {name: p for name, p in parameters.items() if not p.requires_grad}

    def _compute_batched(
        self, features: Features, labels: Tensor, keys: Tensor
    ) -> tuple[list[Tensor], Tensor]:
        trainable, rest = self._split_parameters()

        def loss_of(trainable: Named, features: Features, label: Tensor, key: Tensor) -> Tensor:
            self._dropouts.set_example_key(key)
            alone = map_inputs(lambda tensor: tensor.unsqueeze(0), features)
            _, losses = self._forward({**rest, **trainable}, alone, label.unsqueeze(0))
            return losses.sum()

        # "different": an example's random numbers, as of a user's own dropout, are its own.
        each = vmap(grad_and_value(loss_of), in_dims=(None, 0, 0, 0), randomness="different")
        with warnings.catch_warnings():
            # torch warns where vmap falls back to a loop: that is slow, not wrong.
            warnings.filterwarnings("ignore", message="There is a performance drop")
            grads, losses = each(trainable, features, labels, keys)
        return list(grads.values()), losses

    @torch.enable_grad()
    def _compute_singly(
        self, features: Features, labels: Tensor, keys: Tensor
    ) -> tuple[list[Tensor], Tensor]:
        trainable, rest = self._split_parameters()
        leaves = {name: value.requires_grad_() for name, value in trainable.items()}
        grads: list[list[Tensor]] = []
        each: list[Tensor] = []
        for place, key in enumerate(keys):
            self._dropouts.set_example_key(key)
            row = slice(place, place + 1)
            _, losses = self._forward({**rest, **leaves}, slice_rows(features, row), labels[row])
            grads.append(_differentiate(losses.sum(), list(leaves.values())))
            each.append(losses.detach().sum())
        return [torch.stack(rows) for rows in zip(*grads, strict=True)], torch.stack(each)

    def _forward(
        self, parameters: Mapping[str, Tensor], features: Features, labels: Tensor
    ) -> tuple[Named, Tensor]:
        """Return copies of the buffers as the forward pass leaves them, and the losses."""
        buffers = {name: value.clone() for name, value in self._module.named_buffers()}
        tensors = {**parameters, **buffers}
        # A clone: a forward pass may write to its inputs.
        inputs = split_arguments(map_inputs(torch.clone, features))
        outputs = require_one_tensor(functional_call(self._module, tensors, *inputs))
        return buffers, self._objective.losses(outputs, labels)

    @torch.no_grad()
    def _try(self, features: Features, labels: Tensor) -> None:
        """Check on a first batch that an example's loss depends on that example only.

        Whether the model draws random numbers is decided by its losses: a generator that has
        moved says little, since other threads draw from it. A model that draws is not compared,
        because the draws of an example depend on those before it.
        """
        before = {name: value.clone() for name, value in self._module.named_buffers()}

        def losses_of(rows: slice, *, seed: int) -> tuple[Tensor, bool]:
            """Return the losses, and whether Python's or numpy's generator has moved."""
            self._dropouts.set_key(0, first=rows.start)
            seed_global_generators(Seed(seed))
            with preserve_global_generators() as have_moved:
                after, losses = self._forward(
                    dict(self._module.named_parameters()), slice_rows(features, rows), labels[rows]
                )
                moved = have_moved()
            for name, value in after.items():
                if value.is_floating_point() and not torch.equal(value, before[name]):
                    raise SettingsRefused(
                        f"the forward pass changes the buffer {name!r}, which would leave the "
                        "client without noise; do not change it in training"
                    )
            return losses, moved

        everything, last = slice(0, len(labels)), slice(len(labels) - 1, len(labels))
        with (
            preserve_generator(torch.default_generator),
            preserve_generator(global_generator(labels.device)),
            preserve_global_generators(),
        ):
            whole, _ = losses_of(everything, seed=0)
            for _ in range(_MOST_PASSES):
                again, moved = losses_of(everything, seed=0)
                repeats = _are_close(again, whole)
                if repeats or not moved:
                    break  # else another thread may have drawn in between
            if not repeats:
                raise SettingsRefused(
                    "a second forward pass gives other losses for the same examples, so the model "
                    "keeps state of earlier examples, such as a hidden state, which would leak "
                    "into the gradients of later ones; reset that state in each call"
                )
            draws = not all(
                _are_close(losses_of(everything, seed=seed)[0], whole) for seed in (1, 2, 3)
            )
            # Both ends of the batch: in a model that carries state along the batch, the first
            # example depends on no other, but the last one does.
            ends = torch.cat([losses_of(row, seed=0)[0] for row in (slice(0, 1), last)])
        if not draws and not _are_close(ends, whole[[0, -1]]):
            raise SettingsRefused(
                "an example's loss depends on the others in its batch, so there are no "
                f"per-example gradients to clip; {_REMEDY}"
            )
        self._is_tried = True


def _differentiate(loss: Tensor, leaves: list[Tensor]) -> list[Tensor]:
    """Return the gradient of each leaf, zeros where the loss does not depend on it."""
    if not loss.requires_grad:
        return [torch.zeros_like(leaf) for leaf in leaves]
    found = torch.autograd.grad(loss, leaves, allow_unused=True, materialize_grads=True)
    return list(found)


def _are_close(losses: Tensor, others: Tensor) -> bool:
    return torch.allclose(losses, others, rtol=1e-3, atol=1e-5, equal_nan=True)
