"""A model as one flat vector, and the layout that maps tensor names to parts of it.

Each tensor of a model has one role, which follows from the module alone:

- *Trained*: a parameter with ``requires_grad``.
- *Statistic*: a saved floating-point buffer, such as BatchNorm's running mean. Training may change
  it, but no optimizer does. The buffers of a normalization layer that never updates them
  (momentum 0, or in evaluation mode whenever the model is in training mode) are frozen instead,
  and so are those named by :func:`freeze_buffers`.
- *Frozen*: every other tensor: parameters without ``requires_grad``, of any dtype, and integer and
  boolean buffers. Training never changes it.

The vector has the trained parameters first, then the statistics. Frozen tensors are not in it, so
no delta, clip, mask, noise or server optimizer affects them.

Arithmetic on models works on vectors and on stacks of them. Names and shapes matter only where
tensors come from a module or from the wire. Shape legend of the whole package: P numbers in the
vector of one model, Q of them trained, B clients in a block, so ``deltas_BP``.
"""

from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import chain
from typing import Self

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from fedlearn.core.messages import select_constants

#: Attribute of a module for the names of the buffers that :func:`freeze_buffers` froze.
_HELD = "_fedlearn_held_buffers"


class NoModel(nn.Module):
    """Stands for the model of a run that trains none: it has no tensors, and computes nothing.

    Example:
        >>> Params.of(NoModel()).vector
        tensor([], dtype=torch.float64)
    """


@dataclass(frozen=True)
class TensorSpec:
    """One named tensor of the vector.

    Attributes:
        name: Its name in ``Module.state_dict()``.
        dtype: Its dtype in the module; in the vector it has the layout's dtype.
        offset: Index of its first element in the vector.
    """

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    offset: int

    @cached_property
    def size(self) -> int:
        """Number of elements."""
        return torch.Size(self.shape).numel()


@dataclass(frozen=True)
class Layout:
    """Maps each trained parameter and statistic to its place in a model's flat vector.

    Attributes:
        trainable: The trained parameters: the first :attr:`num_trainable` elements.
        statistics: The floating-point buffers, which come after them.
        dtype: Dtype of the vector: float64 if any of these tensors is float64, else float32.
        common_dtype: The dtype of all floating-point tensors of the module, frozen ones included;
            ``None`` if there are several.
        aliases: The other names of tied tensors in ``Module.state_dict()``, each with the name
            that the layout uses for the tensor.
    """

    trainable: tuple[TensorSpec, ...]
    statistics: tuple[TensorSpec, ...]
    dtype: torch.dtype
    common_dtype: torch.dtype | None
    aliases: Mapping[str, str] = field(default_factory=dict)

    @classmethod
    def of(cls, module: nn.Module) -> Self:
        """Return the layout of ``module``.

        Raises:
            ValueError: No parameter is trained, a trained one is not a real float of 16 to 64
                bits, a tensor shares memory with one that training changes, or a module is lazy.
        """
        if isinstance(module, NoModel):
            # In float64, in which sums of counts and squares are exact for longer.
            return cls((), (), torch.float64, None)
        _require_shapes(module)
        # keep_vars: the very tensors of the module, so that tied ones are recognized by their
        # identity.
        parameters, saved = dict(module.named_parameters()), module.state_dict(keep_vars=True)
        buffers = {name: value for name, value in module.named_buffers() if name in saved}
        trains = {name: value for name, value in parameters.items() if value.requires_grad}
        if not parameters:
            raise ValueError("the model has no parameters; there is nothing to train")
        if not trains:
            raise ValueError(
                "the model has no parameter to train: all are frozen (requires_grad is False); "
                "leave some of them trainable"
            )
        for name, value in trains.items():
            if not _can_change(value):
                raise ValueError(
                    f"parameter {name!r} is {value.dtype}; only real floats of 16 to 64 bits "
                    "train; freeze it with requires_grad_(False), or convert it"
                )
        unchanged = _find_frozen_buffers(module)
        statistics = {
            name: value
            for name, value in buffers.items()
            if _can_change(value) and name not in unchanged
        }
        everything = parameters | buffers
        _require_own_memory(everything, changing=trains.keys() | statistics.keys())
        floats = {value.dtype for value in everything.values() if value.is_floating_point()}
        # The trained parameters first: the vector's prefix is what optimizers and norms see.
        specs = _list_specs(trains | statistics)
        is_double = any(spec.dtype == torch.float64 for spec in specs)
        return cls(
            specs[: len(trains)],
            specs[len(trains) :],
            torch.float64 if is_double else torch.float32,
            floats.pop() if len(floats) == 1 else None,
            _find_aliases(saved, everything),
        )

    def exclude(self, names: Collection[str]) -> Self:
        """Return the layout without the tensors of these names.

        Raises:
            ValueError: No trained parameter would be left.

        Example:
            >>> layout = Layout.of(nn.Sequential(nn.Linear(3, 2), nn.Linear(2, 1)))
            >>> layout.size, layout.exclude(["1.weight", "1.bias"]).size
            (11, 8)
        """
        if all(spec.name in names for spec in self.trainable):
            raise ValueError("no trained parameter is left")
        found, offset = list[TensorSpec](), 0
        for spec in self.specs:
            if spec.name not in names:
                found.append(replace(spec, offset=offset))
                offset += spec.size
        num_trained = sum(spec.name not in names for spec in self.trainable)
        return replace(
            self, trainable=tuple(found[:num_trained]), statistics=tuple(found[num_trained:])
        )

    @cached_property
    def specs(self) -> tuple[TensorSpec, ...]:
        """All tensors in vector order."""
        return self.trainable + self.statistics

    @cached_property
    def trainable_names(self) -> tuple[str, ...]:
        """Names of the trained parameters, in vector order."""
        return tuple(spec.name for spec in self.trainable)

    @cached_property
    def trainable_shapes(self) -> tuple[tuple[int, ...], ...]:
        """Shapes of the trained parameters, in vector order."""
        return tuple(spec.shape for spec in self.trainable)

    @cached_property
    def num_trainable(self) -> int:
        """Q, the number of elements that local training changes."""
        return sum(spec.size for spec in self.trainable)

    @cached_property
    def size(self) -> int:
        """P, the length of the vector."""
        return sum(spec.size for spec in self.specs)

    @cached_property
    def num_bytes(self) -> int:
        """Size in bytes of all tensors, in the model's own dtypes."""
        return sum(spec.size * spec.dtype.itemsize for spec in self.specs)

    @cached_property
    def by_name(self) -> Mapping[str, TensorSpec]:
        """The specs by name."""
        return {spec.name: spec for spec in self.specs}

    @cached_property
    def others(self) -> tuple[TensorSpec, ...]:
        """The specs of the tensors whose dtype in the module is not that of the vector."""
        return tuple(spec for spec in self.specs if spec.dtype != self.dtype)

    def dtypes(self) -> str | None:
        """Describe the tensors' dtypes to the user; ``None`` if all have the vector's dtype.

        Example:
            >>> Layout.of(nn.Linear(2, 2).bfloat16()).dtypes()
            "trains and is sent in the model's own dtypes: torch.bfloat16 ('weight', ...)"
        """
        if not self.others:
            return None
        # Reversed, so that the first tensor of each dtype is the one that stays.
        first = {spec.dtype: spec.name for spec in reversed(self.specs)}
        listed = ", ".join(f"{dtype} ({name!r}, ...)" for dtype, name in reversed(first.items()))
        return f"trains and is sent in the model's own dtypes: {listed}"

    def views(self, stack: Tensor) -> dict[str, Tensor]:
        """Split vectors ``stack`` [..., P] into named views of shape [..., *shape] each."""
        lead = stack.shape[:-1]
        return {
            spec.name: stack[..., spec.offset : spec.offset + spec.size].view((*lead, *spec.shape))
            for spec in self.specs
        }

    def pack(self, tensors: Mapping[str, Tensor], *, out: Tensor | None = None) -> Tensor:
        """Copy the named tensors into one vector: ``out`` if given, else a new one.

        Raises:
            KeyError: A name of the layout is missing.
        """
        vector = torch.empty(self.size, dtype=self.dtype) if out is None else out
        for name, view in self.views(vector).items():
            view.copy_(tensors[name].detach())
        return vector


def _find_aliases(saved: Mapping[str, Tensor], known: Mapping[str, Tensor]) -> dict[str, str]:
    # named_parameters() lists a tied tensor once, state_dict() under each of its names.
    names = {id(value): name for name, value in known.items()}
    others = {name: names.get(id(value)) for name, value in saved.items() if name not in known}
    return {alias: name for alias, name in others.items() if name is not None}


def _require_shapes(module: nn.Module) -> None:
    for name, value in chain(module.named_parameters(), module.named_buffers()):
        if is_lazy(value):
            raise ValueError(
                f"{name!r} has no shape yet, since its module is lazy; run one batch through the "
                "model where you build it, so that its shapes are known"
            )


@dataclass(frozen=True, eq=False)
class Params:
    """A global model: the vector, its layout, and the frozen tensors.

    Attributes:
        vector: Shape [P].
        constants: Frozen parameters and buffers by name, in their own dtypes; never changed.
        whole: Layout of the whole model, if each client trains and keeps some of the constants
            for itself; they are then initial values. ``None``: there are no such tensors.
    """

    layout: Layout
    vector: Tensor
    constants: Mapping[str, Tensor]
    whole: Layout | None = None

    @classmethod
    def of(cls, module: nn.Module) -> Self:
        """Return a copy of the parameters and buffers of ``module``.

        Raises:
            ValueError: As :meth:`Layout.of`, or a tensor is on the meta device.
        """
        layout = Layout.of(module)
        saved = module.state_dict()
        if without := [name for name, value in saved.items() if value.is_meta]:
            raise ValueError(
                f"{without[0]!r} is on the meta device and has no values; build the model on a "
                "device that has memory"
            )
        tensors = dict(module.named_parameters()) | dict(module.named_buffers())
        constants = {
            name: value.detach().clone()
            for name, value in tensors.items()
            if name in saved and name not in layout.by_name
        }
        return cls(layout, layout.pack(saved), constants)

    @cached_property
    def local(self) -> tuple[str, ...]:
        """Names of the tensors that each client keeps for itself, in the order of the vector."""
        if self.whole is None:
            return ()
        shared = self.layout.by_name
        return tuple(spec.name for spec in self.whole.specs if spec.name not in shared)

    @property
    def num_bytes(self) -> int:
        """Size in bytes of the model as sent in each round.

        Without the constants that are sent separately: clients have them already, from an earlier
        round or from their own copy of the model.
        """
        kept = select_constants(self.constants, local=self.local)
        sent = (value.nbytes for name, value in self.constants.items() if name not in kept)
        return self.layout.num_bytes + sum(sent)

    @property
    def num_elements(self) -> int:
        """Number of elements of all tensors, frozen ones included."""
        return self.layout.size + sum(value.numel() for value in self.constants.values())

    def to_tensors(self) -> dict[str, Tensor]:
        """Return every tensor by name, in the model's own dtypes."""
        views = self.layout.views(self.vector)
        tensors = {spec.name: views[spec.name].to(spec.dtype) for spec in self.layout.specs}
        return {**tensors, **self.constants}

    def keep_local(self, names: Sequence[str]) -> Self:
        """Return the model without some tensors, which each client then keeps for itself.

        Raises:
            ValueError: No trained parameter would be left.

        Example:
            >>> params = Params.of(nn.Sequential(nn.Linear(3, 2), nn.Linear(2, 1)))
            >>> shared = params.keep_local(["1.weight", "1.bias"])
            >>> shared.vector.shape, sorted(shared.constants)
            (torch.Size([8]), ['1.bias', '1.weight'])
        """
        if not names:
            return self
        tensors, layout = self.to_tensors(), self.layout.exclude(names)
        constants = {**self.constants, **{name: tensors[name].clone() for name in names}}
        vector = layout.pack(tensors, out=self.vector.new_empty(layout.size))
        return replace(self, layout=layout, vector=vector, constants=constants, whole=self.layout)

    def complete(self) -> Self:
        """Return the whole model, with the initial values of what each client keeps for itself.

        It is the inverse of :meth:`keep_local`.
        """
        layout = self.whole
        if layout is None:
            return self
        vector = layout.pack(self.to_tensors(), out=self.vector.new_empty(layout.size))
        constants = {n: value for n, value in self.constants.items() if n not in self.local}
        return replace(self, layout=layout, vector=vector, constants=constants, whole=None)

    def round_to_dtypes(self) -> Self:
        """Round every value to its tensor's own dtype, as clients receive it."""
        if not self.layout.others:
            return self
        vector = self.layout.pack(self.to_tensors(), out=torch.empty_like(self.vector))
        return self.with_vector(vector)

    def current_statistics(self) -> Tensor:
        """Return the statistics, a view: shape [P - Q]."""
        return self.vector[self.layout.num_trainable :]

    def round_statistics(self) -> Tensor:
        """Return the statistics as clients receive them: shape [P - Q], in the vector's dtype."""
        return self.round_to_dtypes().current_statistics()

    def load_into(self, module: nn.Module) -> None:
        """Copy the parameters and buffers into ``module``.

        Raises:
            ValueError: A tensor is missing from the module or has another shape.
        """
        targets = dict(module.named_parameters()) | dict(module.named_buffers())
        for name, value in self.to_tensors().items():
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


def freeze_buffers(module: nn.Module, names: Collection[str]) -> nn.Module:
    """Declare buffers of ``module`` frozen, by their names in its ``state_dict``; return it."""
    setattr(module, _HELD, frozenset(names))
    return module


def compute_delta(
    local: Mapping[str, Tensor], start: Mapping[str, Tensor], *, order: Sequence[str]
) -> Tensor:
    """Return local minus start as one vector, in the dtype of :func:`choose_delta_dtype`.

    Args:
        local: A client's model after training, by name, on any device and of any floating-point
            dtype.
        start: The model that it started from, with the same shapes.
        order: The names of the averaged tensors, in the order in which they form one vector.

    Example:
        >>> start = {"w": torch.zeros(2), "b": torch.ones(1)}
        >>> compute_delta({"w": torch.ones(2), "b": torch.zeros(1)}, start, order=["b", "w"])
        tensor([-1.,  1.,  1.])
    """
    sizes = [start[name].numel() for name in order]
    vector = torch.empty(sum(sizes), dtype=choose_delta_dtype(start, order))
    for name, part in zip(order, vector.split(sizes), strict=True):
        # Subtract in the wider of the two dtypes: rounding the global model to the narrower one
        # would count as a change.
        value = torch.sub(local[name], start[name].to(local[name].device))
        part.view(start[name].shape).copy_(value)
    return vector


def rebase_statistics(delta_P: Tensor, *, sent_S: Tensor | None, current_S: Tensor) -> Tensor:
    """Make the statistics in a client's delta relative to the current model.

    Statistics are averaged as values: the current statistics plus the mean of such deltas are the
    mean of the clients' local values, no matter which model each client started from. Adding up
    changes relative to older models could give anything, such as a negative variance.

    Args:
        delta_P: Local model minus sent model: shape [P]; not written to.
        sent_S: The statistics that the client was sent, as :meth:`Params.round_statistics`.
            ``None`` if they are no longer known: the delta then leaves the statistics unchanged.
        current_S: The statistics of the model that the delta will be added to: shape [P - Q].

    Example:
        >>> delta = torch.tensor([0.5, -3.0])  # a weight, and a variance: 3.25 before, 0.25 now
        >>> rebase_statistics(
        ...     delta, sent_S=torch.tensor([3.25]), current_S=torch.tensor([1.0])
        ... )
        tensor([ 0.5000, -0.7500])
    """
    trained_Q, changes_S = delta_P.split([len(delta_P) - len(current_S), len(current_S)])
    if sent_S is None:
        return torch.cat([trained_Q, torch.zeros_like(changes_S)])
    shift_S = sent_S.to(current_S.device) - current_S
    return torch.cat([trained_Q, changes_S + shift_S]) if shift_S.any() else delta_P


def choose_delta_dtype(start: Mapping[str, Tensor], order: Sequence[str]) -> torch.dtype:
    """Return the dtype of a :func:`compute_delta`: float64 if a tensor is, or if there is none."""
    # As `Layout.of`: without a model, numbers are float64.
    is_double = not order or any(start[name].dtype == torch.float64 for name in order)
    return torch.float64 if is_double else torch.float32


def _can_change(value: Tensor) -> bool:
    return value.is_floating_point() and value.itemsize > 1  # torch has no addition of float8


def _list_specs(tensors: Mapping[str, Tensor]) -> tuple[TensorSpec, ...]:
    specs, offset = list[TensorSpec](), 0
    for name, value in tensors.items():
        specs.append(TensorSpec(name, tuple(value.shape), value.dtype, offset))
        offset += value.numel()
    return tuple(specs)


def _find_frozen_buffers(module: nn.Module) -> set[str]:
    """Find the frozen buffers: declared frozen, or never updated by their layer."""
    names = set[str](getattr(module, _HELD, ()))
    with _use_training_mode(module):
        for prefix, layer in module.named_modules():
            if not isinstance(layer, nn.modules.batchnorm._NormBase):  # noqa: SLF001 - of all of them
                continue
            # Still in evaluation mode: the layer overrides train(), as frozen BatchNorms do.
            if not layer.training or layer.momentum == 0.0:
                names |= {f"{prefix}.{name}".lstrip(".") for name, _ in layer.named_buffers()}
    return names


@contextmanager
def _use_training_mode(module: nn.Module) -> Iterator[None]:
    # A layer that overrides train() may stay in evaluation mode, which callers look for.
    modes = [(layer, layer.training) for layer in module.modules()]
    module.train()
    try:
        yield
    finally:
        for layer, is_training in modes:
            layer.training = is_training


def _require_own_memory(tensors: Mapping[str, Tensor], *, changing: Collection[str]) -> None:
    """Check that no tensor that changes shares memory with another one.

    In the vector they would be two tensors, whose values would drift apart.

    Raises:
        ValueError: A tensor that changes shares memory with another one.
    """
    # Sorted by address: only spans that begin before this one ends can overlap it.
    spans = sorted((*_get_span(value), name) for name, value in tensors.items() if value.numel())
    for place, (_, _, end, one) in enumerate(spans):
        for device, begin, _, other in spans[place + 1 :]:
            if device != spans[place][0] or begin >= end:
                break
            if (one in changing or other in changing) and _do_overlap(tensors[one], tensors[other]):
                raise ValueError(
                    f"{one!r} and {other!r} share memory, but are two tensors of the model, which "
                    "would train separately; assign the same nn.Parameter to both, or give one of "
                    "them a copy"
                )


def _get_span(value: Tensor) -> tuple[str, int, int]:
    """Return a tensor's device and the start and end addresses of its memory; 0 without data."""
    begin = value.data_ptr()
    last = sum(
        (size - 1) * stride for size, stride in zip(value.shape, value.stride(), strict=True)
    )
    return str(value.device), begin, begin + (last + 1) * value.itemsize if begin else 0


def _do_overlap(one: Tensor, other: Tensor) -> bool:
    """Whether two tensors with overlapping spans share an element; strided spans have gaps."""
    # Elements cannot be compared: assume that they overlap.
    if one.itemsize != other.itemsize or _get_storage(one) != _get_storage(other):
        return True
    # Mark the elements of one tensor, then look whether the other one has any of them.
    used = torch.zeros(one.untyped_storage().nbytes() // one.itemsize, dtype=torch.bool)
    used.as_strided(one.shape, one.stride(), one.storage_offset()).fill_(True)
    return bool(used.as_strided(other.shape, other.stride(), other.storage_offset()).any())


def _get_storage(value: Tensor) -> int:
    return value.untyped_storage().data_ptr()
