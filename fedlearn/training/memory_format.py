"""Channels-last convolutions, where they give the same result.

On a CPU that takes up to a third less time. A module must bear it: code that views the output of
a convolution, or fills a mask in the order of memory, does not. So it is tried out first, once a
model, on some examples. No clock decides: who repeats a run repeats its bits.

References:
    PyTorch, `Channels Last Memory Format
    <https://docs.pytorch.org/tutorials/intermediate/memory_format_tutorial.html>`_.
"""

from collections.abc import Callable, Mapping

import torch
from torch import Tensor, nn
from torch.nn import Parameter

#: From weights of convolutions, by name, to a loss.
LossOf = Callable[[Mapping[str, Tensor]], Tensor]
#: Largest difference of loss and gradients that is another order of adding up, relative; the
#: rounding of float32 is far below, another dropout mask far above.
_TOLERANCE = 1e-2


def convolution_weights(module: nn.Module, *, device: torch.device) -> dict[str, Parameter]:
    """Return the weights that are worth laying out channels last: by name, none but on a CPU."""
    if device.type != "cpu":
        return {}
    convolutions = {
        id(child.weight)
        for child in module.modules()
        if isinstance(child, nn.Conv2d) and child.weight.dtype == torch.float32
    }
    return {name: p for name, p in module.named_parameters() if id(p) in convolutions}


def agrees(weights: Mapping[str, Tensor], loss_of: LossOf) -> bool:
    """Return whether a loss and its gradients do not depend on the format of ``weights``.

    Args:
        weights: Of convolutions, by name.
        loss_of: The loss of some examples with such weights in their places: a scalar.

    Raises:
        Exception: The loss cannot be computed in either format.
    """
    plain = _loss_and_gradients(weights, loss_of)
    try:
        last = _loss_and_gradients(
            {name: channels_last(weight) for name, weight in weights.items()}, loss_of
        )
    except (RuntimeError, ValueError, TypeError, AssertionError):  # the module's own code
        return False
    return all(
        bool((a - b).norm() <= _TOLERANCE * a.norm()) for a, b in zip(plain, last, strict=True)
    )


def channels_last(weight: Tensor) -> Tensor:
    """Return a copy of a convolution's weight, shape [out, in, height, width], in this format."""
    return weight.detach().clone(memory_format=torch.channels_last)


def _loss_and_gradients(weights: Mapping[str, Tensor], loss_of: LossOf) -> list[Tensor]:
    with torch.enable_grad():
        leaves = {name: weight.detach().requires_grad_() for name, weight in weights.items()}
        loss = loss_of(leaves)
        gradients = torch.autograd.grad(
            loss, list(leaves.values()), allow_unused=True, materialize_grads=True
        )
    return [loss.detach(), *gradients]
