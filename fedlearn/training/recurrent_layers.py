"""Make torch's recurrent layers work under ``vmap``.

torch adds the input's part of a gate to the hidden state's part in place. If ``vmap`` batches the
examples but not the hidden state, the sum does not fit into that part, and the layer raises. This
happens with the default zero state, and with a learned initial state.
"""

from typing import Any

import torch
from torch import Tensor, nn

_Recurrent = nn.RNNBase | nn.RNNCellBase


def batch_hidden_states(module: nn.Module) -> None:
    """Give each recurrent layer of a module an initial state that ``vmap`` batches.

    The values that the layer computes do not change. Packed sequences are left alone: their lengths
    must be concrete numbers, which do not exist under ``vmap``.

    Args:
        module: The module, whose recurrent layers get a forward pre-hook.
    """
    for layer in module.modules():
        if isinstance(layer, _Recurrent):
            layer.register_forward_pre_hook(_with_batched_state, with_kwargs=True)


def _with_batched_state(
    layer: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]] | None:  # Any: what custom code calls the layer with
    given: dict[str, Any] = dict(zip(("input", "hx"), args, strict=False)) | kwargs
    inputs, state = given.get("input"), given.get("hx")
    if not isinstance(inputs, Tensor) or inputs.dim() < 1:
        return None  # a packed sequence, or an input for which the layer raises its own error
    if state is None:
        state = _make_zeros(layer, inputs)
    batched = (
        tuple(_batch_state(each, inputs) for each in state)
        if isinstance(state, tuple)
        else _batch_state(state, inputs)
    )
    return (), given | {"hx": batched}


def _batch_state(state: Tensor, inputs: Tensor) -> Tensor:
    # The trick: `new_zeros` of a tensor that `vmap` batches is itself batched, and so is the sum.
    return state + inputs.new_zeros(state.shape, dtype=state.dtype)


def _make_zeros(layer: nn.Module, inputs: Tensor) -> Tensor | tuple[Tensor, ...]:
    """Return the zero state that torch uses by default."""
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
