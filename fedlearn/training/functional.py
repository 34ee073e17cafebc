"""Call a module with other parameters and buffers in place of its own."""

from collections import defaultdict
from collections.abc import Mapping
from typing import Any

import torch.func
from torch import Tensor, nn


def functional_call(
    module: nn.Module,
    tensors: Mapping[str, Tensor],
    args: tuple[Any, ...],  # Any: what a custom forward takes, as in torch
    kwargs: Mapping[str, Any] | None = None,
) -> Any:  # Any: what it returns
    """Call a module with other parameters and buffers, then restore its own.

    Use this in place of :func:`torch.func.functional_call`, which does not restore the tensors of a
    layer that occurs twice in the model (seen with torch 2.13): later steps would then train the
    wrong tensors.

    Args:
        module: The module.
        tensors: Replacements by name; a tensor that the module ties under several names is
            replaced under each of them.
        args: Positional arguments of the forward pass.
        kwargs: Keyword arguments of the forward pass.
    """
    # By tensor: named_modules() visits a layer that occurs twice only once, under its first name.
    names_of = defaultdict[int, list[str]](list)
    tensor_of = dict[str, int]()
    for prefix, part in module.named_modules():
        own = (
            *part.named_parameters(prefix, recurse=False, remove_duplicate=False),
            *part.named_buffers(prefix, recurse=False, remove_duplicate=False),
        )
        for name, value in own:
            names_of[id(value)].append(name)
            tensor_of[name] = id(value)
    replaced = {
        each: value
        for name, value in tensors.items()
        for each in (names_of[tensor_of[name]] if name in tensor_of else [name])
    }
    return torch.func.functional_call(module, replaced, args, dict(kwargs or {}), tie_weights=False)
