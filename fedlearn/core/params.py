"""A model as one flat vector, and the layout that gives its parts their names.

Arithmetic on models works on vectors and on stacks of them; names and shapes matter only where
tensors enter from a module or from the wire. Shape legend of the whole package: P parameters of
one model, B clients in a block, so ``deltas_BP``.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Self

import torch
from torch import Tensor, nn


@dataclass(frozen=True)
class TensorSpec:
    """One named tensor of a model.

    Attributes:
        name: Its name in ``Module.state_dict()``.
        dtype: Its dtype in the module; in the vector it has the layout's.
        offset: Index of its first element in the vector.
        is_trainable: Whether local training changes it: a parameter that is not frozen.
    """

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    offset: int
    is_trainable: bool

    @cached_property
    def size(self) -> int:
        """Number of elements."""
        return torch.Size(self.shape).numel()


@dataclass(frozen=True)
class Layout:
    """Where each tensor of a model lies in its flat vector.

    Parameters come first, then floating-point buffers ("statistics", as BatchNorm's), so a server
    optimiser acts on a prefix. Integer and boolean buffers are constants: never averaged.

    Attributes:
        specs: The tensors in vector order.
        num_parameters: Length of the prefix that holds parameters, not statistics.
        size: P, the length of the vector.
        dtype: Dtype of the vector: float64 if any tensor is, else float32.
    """

    specs: tuple[TensorSpec, ...]
    num_parameters: int
    size: int
    dtype: torch.dtype

    @classmethod
    def of(cls, module: nn.Module) -> Self:
        """Return the layout of ``module``.

        Raises:
            ValueError: A parameter is complex or quantised, or there is none.
        """
        parameters = dict(module.named_parameters())
        saved = module.state_dict(keep_vars=True)
        statistics = {
            name: value
            for name, value in module.named_buffers()
            if name in saved and value.is_floating_point()
        }
        if not parameters:
            raise ValueError("the model has no parameters; there is nothing to train")
        dtype = torch.float32
        for name, value in (parameters | statistics).items():
            can_train = value.is_floating_point() and value.itemsize > 1  # float8 does not add
            if not (can_train or (value.is_floating_point() and not value.requires_grad)):
                raise ValueError(
                    f"parameter {name!r} is {value.dtype}; only real floats of 16 to 64 bits train"
                )
            if value.dtype == torch.float64:
                dtype = torch.float64
        specs, offset, num_parameters = [], 0, 0
        for name, value in (parameters | statistics).items():
            trains = value.requires_grad and name in parameters
            specs.append(TensorSpec(name, tuple(value.shape), value.dtype, offset, trains))
            offset += value.numel()
            num_parameters += value.numel() if name in parameters else 0
        return cls(tuple(specs), num_parameters, offset, dtype)

    @cached_property
    def by_name(self) -> Mapping[str, TensorSpec]:
        """The specs by name."""
        return {spec.name: spec for spec in self.specs}

    @cached_property
    def others(self) -> tuple[TensorSpec, ...]:
        """The specs of the tensors that the module has in another dtype than the vector."""
        return tuple(spec for spec in self.specs if spec.dtype != self.dtype)

    @property
    def common_dtype(self) -> torch.dtype | None:
        """The dtype of all tensors in the module; ``None`` if there are several."""
        dtypes = {spec.dtype for spec in self.specs}
        return dtypes.pop() if len(dtypes) == 1 else None

    def dtypes(self) -> str | None:
        """Return a line for the user on the dtypes of the tensors, unless all have the vector's.

        Example:
            >>> Layout.of(nn.Linear(2, 2).bfloat16()).dtypes()
            "trains and travels in the model's own dtypes: torch.bfloat16 ('weight', ...)"
        """
        if not self.others:
            return None
        first = {spec.dtype: spec.name for spec in reversed(self.specs)}
        listed = ", ".join(f"{dtype} ({name!r}, ...)" for dtype, name in reversed(first.items()))
        return f"trains and travels in the model's own dtypes: {listed}"

    @cached_property
    def trainable(self) -> tuple[TensorSpec, ...]:
        """The specs of the parameters that local training changes."""
        return tuple(spec for spec in self.specs if spec.is_trainable)

    @cached_property
    def num_trainable(self) -> int:
        """Q, the number of elements that local training changes."""
        return sum(spec.size for spec in self.trainable)

    def views(self, stack: Tensor) -> dict[str, Tensor]:
        """Return the named tensors, [..., *shape] each, as views into ``stack``, [..., P]."""
        lead = stack.shape[:-1]
        return {
            spec.name: stack[..., spec.offset : spec.offset + spec.size].view((*lead, *spec.shape))
            for spec in self.specs
        }

    def pack(self, tensors: Mapping[str, Tensor], *, out: Tensor | None = None) -> Tensor:
        """Return the named tensors as one vector, written to ``out`` if given.

        Raises:
            KeyError: A name of the layout is missing.
        """
        vector = torch.empty(self.size, dtype=self.dtype) if out is None else out
        for name, view in self.views(vector).items():
            view.copy_(tensors[name].detach())
        return vector


@dataclass(frozen=True, eq=False)
class Params:
    """A global model: the vector, its layout, and what is not averaged.

    Attributes:
        vector: Shape [P].
        constants: Integer and boolean buffers by name; kept as the coordinator has them.
    """

    layout: Layout
    vector: Tensor
    constants: Mapping[str, Tensor]

    @classmethod
    def of(cls, module: nn.Module) -> Self:
        """Return a copy of the parameters and buffers of ``module``."""
        layout = Layout.of(module)
        saved = module.state_dict()
        constants = {
            name: value.detach().clone()
            for name, value in module.named_buffers()
            if name in saved and name not in layout.by_name
        }
        return cls(layout, layout.pack(saved), constants)

    @property
    def num_bytes(self) -> int:
        """Size of the model as it is sent: :meth:`named`."""
        averaged = sum(spec.size * spec.dtype.itemsize for spec in self.layout.specs)
        return averaged + sum(value.nbytes for value in self.constants.values())

    def named(self) -> dict[str, Tensor]:
        """Return every tensor by name, in the model's own dtypes."""
        views = self.layout.views(self.vector)
        tensors = {spec.name: views[spec.name].to(spec.dtype) for spec in self.layout.specs}
        return {**tensors, **self.constants}

    def as_sent(self) -> Self:
        """Return the model with every value as its own dtype has it."""
        if not self.layout.others:
            return self
        vector = self.layout.pack(self.named(), out=torch.empty_like(self.vector))
        return self.with_vector(vector)

    def load_into(self, module: nn.Module) -> None:
        """Copy the parameters and buffers into ``module``.

        Raises:
            ValueError: A tensor is missing from the module or has another shape.
        """
        targets = dict(module.named_parameters()) | dict(module.named_buffers())
        for name, value in self.named().items():
            if name not in targets or targets[name].shape != value.shape:
                found = tuple(targets[name].shape) if name in targets else "nothing"
                raise ValueError(
                    f"the model has {found} where the weights have {name!r} of shape "
                    f"{tuple(value.shape)}; build it as it was built for training"
                )
            with torch.no_grad():
                targets[name].copy_(value)

    def with_vector(self, vector: Tensor) -> Self:
        """Return the same model with other values."""
        return replace(self, vector=vector)


def difference(
    local: Mapping[str, Tensor], start: Mapping[str, Tensor], *, order: Sequence[str]
) -> Tensor:
    """Return local minus start as one vector: float64 if any tensor of the start is, else float32.

    Args:
        local: A client's model by name, of any device and floating-point dtype.
        start: What it began with, of the same shapes.
        order: The names of what is averaged, in the order in which they make one vector.

    Example:
        >>> start = {"w": torch.zeros(2), "b": torch.ones(1)}
        >>> difference({"w": torch.ones(2), "b": torch.zeros(1)}, start, order=["b", "w"])
        tensor([-1.,  1.,  1.])
    """
    is_double = any(start[name].dtype == torch.float64 for name in order)
    sizes = [start[name].numel() for name in order]
    vector = torch.empty(sum(sizes), dtype=torch.float64 if is_double else torch.float32)
    for name, part in zip(order, vector.split(sizes), strict=True):
        # In the wider of both precisions: rounding the global model would be an update.
        value = torch.sub(local[name], start[name].to(local[name].device))
        part.view(start[name].shape).copy_(value)
    return vector
