"""Convert each batch of features to the dtype that the model expects.

In memory, features keep the dtype of the data: images in uint8 take a quarter of the space that
they take in float32. Only a batch is converted. Floats become the model's own floats. For integers
the model decides: pixels become floats with unchanged values, and token ids for an embedding stay
integers.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import chain, product

import torch
from torch import nn

from fedlearn.core.features import (
    Features,
    cast_inputs,
    list_tensors,
    map_inputs,
    name_inputs,
    slice_rows,
    split_arguments,
)
from fedlearn.core.params import Layout
from fedlearn.errors import DataError
from fedlearn.training.functional import functional_call
from fedlearn.training.keyed_dropout import global_generator, preserve_generator

#: Integers so narrow that arithmetic overflows: converted to floats if the model accepts floats,
#: else widened.
_NARROW = {torch.uint8, torch.int8, torch.int16, torch.uint16}
#: Number of examples in a trial forward pass.
_TRIED = 2


class InputCast:
    """Converts features to the dtypes that a module accepts.

    For integer inputs, candidate dtypes are tried in a forward pass on a few examples, once for
    each combination of input dtypes. The trial runs in evaluation mode and leaves the module
    unchanged.

    Args:
        module: The model.
        layout: The module's layout.
    """

    def __init__(self, module: nn.Module, layout: Layout) -> None:
        self._module, self._layout = module, layout
        self._chosen = dict[tuple[torch.dtype, ...], Sequence[torch.dtype]]()

    def __call__(self, features: Features) -> Features:
        """Return the features in the module's dtypes, without a copy of those that fit already."""
        return cast_inputs(features, self.dtypes(features))

    def dtypes(self, features: Features) -> Sequence[torch.dtype]:
        """Return the dtypes that the module accepts for such inputs, in the order of `name_inputs`.

        Args:
            features: At least one example: [N, ...] each.
        """
        own = tuple(tensor.dtype for tensor in list_tensors(features))
        if own not in self._chosen:
            self._chosen[own] = self._choose_dtypes(features, own)
        return self._chosen[own]

    def _choose_dtypes(
        self, features: Features, own: Sequence[torch.dtype]
    ) -> Sequence[torch.dtype]:
        choices = list(product(*map(self._list_candidates, own)))
        if len(choices) == 1:
            return choices[0]
        few = slice_rows(features, slice(_TRIED))
        values = chain(self._module.parameters(), self._module.buffers(), list_tensors(few))
        device = next(values).device
        for dtypes in choices:
            # Copies, because a forward pass may write to its inputs.
            copies = map_inputs(lambda tensor: tensor.to(device, copy=True), few)
            if self._accepts(cast_inputs(copies, dtypes)):
                return dtypes
        return own  # training then meets the error of your own code

    def _list_candidates(self, own: torch.dtype) -> Sequence[torch.dtype]:
        """Return the dtypes to try for an input, the preferred one first."""
        floats = self._layout.common_dtype or self._layout.dtype
        if own.is_floating_point:
            # A module with several dtypes converts its inputs itself, but does not expect float64.
            is_left_alone = self._layout.common_dtype is None and own != torch.float64
            return [own if is_left_alone else floats]
        if own in (torch.bool, torch.complex64, torch.complex128):
            return [own]
        # Wide integers are more likely token ids, narrow ones pixels or other values.
        wide = [own] if own == torch.int64 else [torch.int64]
        return [floats, *wide] if own in _NARROW else list(dict.fromkeys([own, *wide, floats]))

    @torch.no_grad()
    def _accepts(self, features: Features) -> bool:
        buffers = {name: value.clone() for name, value in self._module.named_buffers()}
        args, kwargs = split_arguments(features)
        device = list_tensors(features)[0].device
        with preserve_generator(global_generator(device)), _use_eval_mode(self._module):
            try:
                functional_call(self._module, buffers, args, kwargs)
            except Exception:  # noqa: BLE001 - custom code may raise anything
                return False
        return True

    def require_range(self, features: Features, *, what: str) -> None:
        """Check that no float overflows to infinity in the dtype that the module accepts.

        Args:
            features: Finite: [N, ...] each.
            what: What the features belong to, for the error message.

        Raises:
            DataError: A value overflows.
        """
        for (name, tensor), dtype in zip(
            name_inputs(features).items(), self.dtypes(features), strict=True
        ):
            if tensor.dtype == dtype or not (tensor.is_floating_point() and tensor.numel()):
                continue
            largest = float(torch.stack(tensor.aminmax()).abs().max())
            if largest > torch.finfo(dtype).max:
                raise DataError(
                    f"{name} of {what} reach {largest:g} in {tensor.dtype}, but the largest "
                    f"number in the model's {dtype} is {torch.finfo(dtype).max:g}; scale them, or "
                    f"use a model in {tensor.dtype}"
                )

    def note(self, features: Features) -> str | None:
        """Return a note for the user if integers reach the model as floats, else ``None``."""
        pairs = zip(name_inputs(features).items(), self.dtypes(features), strict=True)
        changed = [
            f"{name} are {tensor.dtype} in memory and {dtype} in a batch: values are not scaled"
            for (name, tensor), dtype in pairs
            if not tensor.is_floating_point() and dtype.is_floating_point
        ]
        return ", ".join(changed).replace("torch.", "") or None


@contextmanager
def _use_eval_mode(module: nn.Module) -> Iterator[None]:
    modes = [(layer, layer.training) for layer in module.modules()]
    module.eval()
    try:
        yield
    finally:
        for layer, mode in modes:
            layer.training = mode
