"""Recurrent layers of torch under ``vmap``.

torch adds the input's part of a gate to the hidden state's part in place. Where ``vmap`` runs over
the examples but not over the hidden state, the sum does not fit into that part, and the layer
raises. This happens with the zeros that a layer starts from, and with a learned first state.
"""

from typing import Any

import torch
from torch import Tensor, nn

_Recurrent = nn.RNNBase | nn.RNNCellBase


def batch_hidden_states(module: nn.Module) -> None:
    """Let each recurrent layer of a module start from a state that ``vmap`` runs over.

    The values that the layer computes do not change. A packed sequence is left alone: its lengths
    are numbers, which ``vmap`` does not have.

    Args:
        module: Its layers get a hook.
    """
    for layer in module.modules():
        if isinstance(layer, _Recurrent):
            layer.register_forward_pre_hook(_with_batched_state, with_kwargs=True)


def _with_batched_state(
    layer: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]] | None:  # Any: what a user calls the layer with
    given: dict[str, Any] = dict(zip(("input", "hx"), args, strict=False)) | kwargs
    inputs, state = given.get("input"), given.get("hx")
    if not isinstance(inputs, Tensor) or inputs.dim() < 1:
        return None  # packed, or an error that the layer raises itself
    if state is None:
        state = _zeros(layer, inputs)
    batched = (
        tuple(_batched(each, inputs) for each in state)
        if isinstance(state, tuple)
        else _batched(state, inputs)
    )
    return (), given | {"hx": batched}


def _batched(state: Tensor, inputs: Tensor) -> Tensor:
    # `new_zeros` of a tensor that `vmap` runs over is one, too.
    return state + inputs.new_zeros(state.shape, dtype=state.dtype)


def _zeros(layer: nn.Module, inputs: Tensor) -> Tensor | tuple[Tensor, ...]:
    """Return the state that torch starts from."""
    if isinstance(layer, nn.RNNCellBase):
        shape: tuple[int, ...] = (*inputs.shape[:-1], layer.hidden_size)
        num_states = 2 if isinstance(layer, nn.LSTMCell) else 1
        shapes = [shape] * num_states
    else:
        assert isinstance(layer, nn.RNNBase)
        depth = layer.num_layers * (2 if layer.bidirectional else 1)
        rows = () if inputs.dim() == 2 else (inputs.shape[0 if layer.batch_first else 1],)  # noqa: PLR2004 - one sequence: [steps, features]
        sizes = [layer.proj_size or layer.hidden_size]
        if isinstance(layer, nn.LSTM):
            sizes.append(layer.hidden_size)
        shapes = [(depth, *rows, size) for size in sizes]
    zeros = tuple(torch.zeros(s, dtype=inputs.dtype, device=inputs.device) for s in shapes)
    return zeros if len(zeros) > 1 else zeros[0]
