"""Features, the inputs of a model's forward: one tensor, a tuple of tensors, or a dict.

One tensor is passed as ``model(x)``, a tuple as ``model(*tensors)``, a dict as
``model(**tensors)``. The first dimension of every tensor counts examples.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, TypeAlias, TypeVar

import torch
from torch import Tensor, nn

from fedlearn.errors import DataError

T = TypeVar("T")
U = TypeVar("U")

Inputs: TypeAlias = T | tuple[T, ...] | Mapping[str, T]
"""One of something, or one for each positional or keyword argument of a forward."""

Features: TypeAlias = Inputs[Tensor]
"""The features of N examples: tensors of shape [N, ...]."""


def name_inputs(inputs: Inputs[T]) -> dict[str, T]:
    """Return the inputs by a name for messages; those of a dict are sorted by their keys.

    Example:
        >>> name_inputs((1, 2)), name_inputs({"mask": 1, "ids": 2}), name_inputs(3)
        ({'input 0': 1, 'input 1': 2}, {"input 'ids'": 2, "input 'mask'": 1}, {'features': 3})
    """
    if isinstance(inputs, tuple):
        return {f"input {place}": each for place, each in enumerate(inputs)}
    if isinstance(inputs, Mapping):
        return {f"input {name!r}": inputs[name] for name in sorted(inputs)}
    return {"features": inputs}


def rebuild_inputs(values: Iterable[U], *, like: Inputs[T]) -> Inputs[U]:
    """Build inputs of the same structure as ``like`` from ``values``, in :func:`name_inputs` order.

    Example:
        >>> rebuild_inputs([1, 2], like={"mask": "m", "ids": "i"})
        {'ids': 1, 'mask': 2}
    """
    if isinstance(like, tuple):
        return tuple(values)
    if isinstance(like, Mapping):
        return dict(zip(sorted(like), values, strict=True))
    (value,) = values
    return value


def map_inputs(function: Callable[[T], U], inputs: Inputs[T]) -> Inputs[U]:
    """Apply ``function`` to each input, keeping the structure."""
    if isinstance(inputs, tuple):
        return tuple(function(each) for each in inputs)
    if isinstance(inputs, Mapping):
        return {name: function(each) for name, each in inputs.items()}
    return function(inputs)


def require_single_input(features: Features) -> Tensor:
    """Return the tensor of features that are a single input.

    Raises:
        DataError: There are several inputs.
    """
    if isinstance(features, Tensor):
        return features
    several: Features = features
    raise DataError(
        f"the features are {', '.join(name_inputs(several))}, where one tensor is needed"
    )


def list_tensors(features: Features) -> Sequence[Tensor]:
    """Return the tensors, always in the same order."""
    return list(name_inputs(features).values())


def take_rows(features: Features, rows: Tensor) -> Features:
    """Copy the rows with these indices: int64 [n], on the device of the features."""
    return map_inputs(lambda tensor: tensor.index_select(0, rows), features)


def slice_rows(features: Features, rows: slice) -> Features:
    """Slice the rows without a copy: views."""
    return map_inputs(lambda tensor: tensor[rows], features)


def move_to_device(features: Features, device: torch.device) -> Features:
    """Move the features to ``device``; tensors already there are not copied."""
    return map_inputs(lambda tensor: tensor.to(device), features)


def cast_floats(features: Features, dtype: torch.dtype) -> Features:
    """Convert floating-point features to ``dtype``; tensors that have it are not copied."""

    def cast(value: Tensor) -> Tensor:
        return value.to(dtype) if value.is_floating_point() else value

    # Without `map_inputs` for one tensor: in a step of a small model, each Python call counts.
    return cast(features) if isinstance(features, Tensor) else map_inputs(cast, features)


def cast_inputs(features: Features, dtypes: Sequence[torch.dtype]) -> Features:
    """Convert each input to its dtype; ``dtypes`` are in the order of :func:`name_inputs`."""
    if isinstance(features, Tensor):  # a fast path, as in `cast_floats`
        return features.to(dtypes[0])
    several: Features = features
    pairs = zip(list_tensors(several), dtypes, strict=True)
    return rebuild_inputs([tensor.to(dtype) for tensor, dtype in pairs], like=several)


def cast_for_trainer(features: Features, dtype: torch.dtype) -> Features:
    """Convert one client's features for a custom trainer.

    Floats become float64 for a model in float64, else float32. Integers keep their dtype.

    Args:
        features: The client's features.
        dtype: The model's dtype.
    """
    return cast_floats(features, torch.float64 if dtype == torch.float64 else torch.float32)


def split_arguments(features: Features) -> tuple[tuple[Tensor, ...], dict[str, Tensor]]:
    """Return the features as positional and keyword arguments of a forward."""
    if isinstance(features, Tensor):
        return (features,), {}
    return (features, {}) if isinstance(features, tuple) else ((), dict(features))


def call_module(module: nn.Module, features: Features) -> Tensor:
    """Run the module's forward on the features.

    Raises:
        TypeError: The output is not one tensor.
    """
    if isinstance(features, Tensor):  # a fast path, as in `cast_floats`
        return require_one_tensor(module(features))
    args, kwargs = split_arguments(features)
    return require_one_tensor(module(*args, **kwargs))


def require_one_tensor(outputs: object) -> Tensor:
    """Check that a forward returned one tensor, and return it.

    Raises:
        TypeError: The output is not one tensor.
    """
    if isinstance(outputs, Tensor):
        return outputs
    raise TypeError(
        f"the model's forward returned a {type(outputs).__name__}; return one tensor whose first "
        "dimension counts examples: select the part that the loss needs, or join several heads by "
        "torch.cat(..., dim=1) and split them in the loss"
    )


def require_one_label_each(features: Features, labels: Tensor) -> None:
    """Check that features are well-formed, with as many examples in each input as there are labels.

    Raises:
        DataError: There is no input, an input is not a tensor, its name is not a string, or its
            first dimension differs from that of ``labels``.
    """
    inputs: Mapping[Any, Any] = features if isinstance(features, Mapping) else name_inputs(features)
    if not inputs or not all(isinstance(name, str) for name in inputs):
        raise DataError(
            f"features are a {type(features).__name__} of {list(inputs)}; give one or more "
            "tensors, in a dict under the names that the model's forward gives them"
        )
    for name, tensor in name_inputs(features).items():
        if not isinstance(tensor, Tensor):
            raise DataError(
                f"{name}: a {type(tensor).__name__}; features are one tensor, or a tuple or a dict "
                "of tensors"
            )
        if not tensor.ndim or not labels.ndim or len(tensor) != len(labels):
            raise DataError(
                f"{name} of shape {tuple(tensor.shape)} and labels of shape "
                f"{tuple(labels.shape)}; the first dimension of both must count examples"
            )


def require_finite(values: Tensor, *, what: str, place: Callable[[int], str]) -> None:
    """Check that no value is NaN or infinite.

    Args:
        values: Values of N examples: [N, ...].
        what: The noun for a value in the message.
        place: Returns where a row is, for the message.

    Raises:
        DataError: A value is NaN or infinite.
    """
    if not values.is_floating_point() or not values.numel():
        return
    low, high = values.aminmax()  # both propagate NaN, and no mask the size of the data is made
    if bool(low.isfinite() & high.isfinite()):
        return
    bad = (~values.isfinite()).flatten(1).any(1) if values.ndim > 1 else ~values.isfinite()
    row = int(bad.nonzero()[0])
    raise DataError(
        f"{place(row)} has a {what} that is NaN or infinite ({int(bad.sum())} such rows); fill or "
        "drop them"
    )
