"""Store convolution weights channels last where that does not change the result.

On a CPU, channels last takes up to a third less time. Not every module supports it: code that views
the output of a convolution, or fills a mask in memory order, breaks. Each model is therefore tried
once on a few examples. Only the results decide, never a timing, so that a repeated run makes the
same choice and gives the same bits.

References:
    PyTorch, `Channels Last Memory Format
    <https://docs.pytorch.org/tutorials/intermediate/memory_format_tutorial.html>`_.
"""

from collections.abc import Callable, Mapping

import torch
from torch import Tensor, nn
from torch.nn import Parameter

#: Computes a loss from the weights of the convolutions, by name.
LossOf = Callable[[Mapping[str, Tensor]], Tensor]
#: Largest relative difference of loss and gradients that may come from another order of summation.
#: Rounding in float32 is far below it, and the effect of another dropout mask far above.
_TOLERANCE = 1e-2


def convolution_weights(module: nn.Module, *, device: torch.device) -> dict[str, Parameter]:
    """Return the weights that channels last could speed up, by name; none unless on a CPU."""
    if device.type != "cpu":
        return {}
    convolutions = {
        id(child.weight)
        for child in module.modules()
        if isinstance(child, nn.Conv2d) and child.weight.dtype == torch.float32
    }
    return {name: p for name, p in module.named_parameters() if id(p) in convolutions}


def agrees(weights: Mapping[str, Tensor], loss_of: LossOf) -> bool:
    """Tell whether a loss and its gradients are the same with ``weights`` stored channels last.

    Args:
        weights: Weights of convolutions, by name.
        loss_of: Computes the scalar loss of some examples with given weights in place of these.

    Raises:
        Exception: The loss cannot be computed even in the plain format.
    """
    plain = _loss_and_gradients(weights, loss_of)
    try:
        last = _loss_and_gradients(
            {name: channels_last(weight) for name, weight in weights.items()}, loss_of
        )
    except (RuntimeError, ValueError, TypeError, AssertionError):  # the module's own code
        return False
    # A NaN compares as false, and so keeps the plain format.
    return all(
        bool((a - b).norm() <= _TOLERANCE * a.norm()) for a, b in zip(plain, last, strict=True)
    )


def channels_last(weight: Tensor) -> Tensor:
    """Copy a convolution's weight, shape [out, in, height, width], into channels-last format."""
    return weight.detach().clone(memory_format=torch.channels_last)


def _loss_and_gradients(weights: Mapping[str, Tensor], loss_of: LossOf) -> list[Tensor]:
    with torch.enable_grad():
        leaves = {name: weight.detach().requires_grad_() for name, weight in weights.items()}
        loss = loss_of(leaves)
        gradients = torch.autograd.grad(
            loss, list(leaves.values()), allow_unused=True, materialize_grads=True
        )
    return [loss.detach(), *gradients]
