"""Parts of the model that each client trains and keeps for itself, such as a personal head.

The coordinator's model has these tensors only as constants: the values from which every client
starts. So they are sent once, and no aggregate, clip, mask, noise or server optimizer affects them.
A client keeps its own values as client state, under the name :data:`LOCAL`.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from functools import cached_property
from typing import TypeVar

import torch
from torch import Tensor, nn

from fedlearn.algorithms.lanes import DELTA, Over
from fedlearn.algorithms.local import extent_of
from fedlearn.algorithms.strategy import Strategy, StrategyWrapper
from fedlearn.core.params import Layout, Params
from fedlearn.errors import ConfigError

#: Name of the client state that holds the local tensors, one after another.
LOCAL = "local"
#: Prefix of a pattern that matches layers by class instead of tensors by name.
_TYPE = "type:"

StrategyT = TypeVar("StrategyT", bound=Strategy)


@dataclass(frozen=True)
class KeepLocal(StrategyWrapper):
    """A strategy in which each client trains and keeps some tensors of the model for itself.

    They do not travel, and buffers such as BatchNorm's statistics can be among them. The global
    model has their initial values. Each client is also evaluated with its own values, recorded as
    ``clients/personal_accuracy_mean`` and so on.

    Attributes:
        inner: The wrapped strategy. Its clients must send nothing along the trained parameters
            but the delta, and it must broadcast nothing along them but the model.
        patterns: Patterns of names in ``Module.state_dict()``, such as ``"head.*"``, or of classes
            of layers, such as ``"type:BatchNorm*"``, with the wildcards of :mod:`fnmatch`. A class
            also matches by the name of its base class.
        named_by: What error messages call the patterns: the algorithm or its argument.

    Example:
        >>> import fedlearn as fl
        >>> local = fl.LocalSgd(epochs=1, batch_size=10, learning_rate=0.1)
        >>> fl.KeepLocal(fl.FedAvg(local), ["head.*", "type:BatchNorm*"]).keep_local
        ('head.*', 'type:BatchNorm*')

    References:
        Arivazhagan et al., 2019, `Federated Learning with Personalization Layers
        <https://arxiv.org/abs/1912.00818>`_ (FedPer); Li et al., 2021, `FedBN
        <https://arxiv.org/abs/2102.07623>`_.
    """

    patterns: Sequence[str]
    named_by: str = field(default="keep_local", kw_only=True, compare=False, repr=False)

    def __post_init__(self) -> None:
        patterns: object = self.patterns
        if isinstance(patterns, str) or not all(isinstance(each, str) for each in self.patterns):
            raise ConfigError(
                f'{self.named_by} is {patterns!r}; give a list of patterns, such as ["head.*"]'
            )

    @property
    def keep_local(self) -> Sequence[str]:
        """Patterns of the inner strategy and of this one."""
        return (*self.inner.keep_local, *self.patterns)


def name_patterns(strategy: Strategy) -> dict[str, str]:
    """Return the name of each pattern of ``keep_local`` in error messages."""
    found = dict[str, str]()
    while isinstance(strategy, StrategyWrapper):
        if isinstance(strategy, KeepLocal):
            found |= dict.fromkeys(strategy.patterns, strategy.named_by)
        strategy = strategy.inner
    return found


def find_local_names(
    module: nn.Module, patterns: Sequence[str], *, named_by: Mapping[str, str] | None = None
) -> tuple[str, ...]:
    """Return the names of the tensors that match a pattern, in the order of the model's vector.

    Frozen tensors may match as well; they are the same for all clients in any case.

    Args:
        module: The model.
        patterns: The patterns.
        named_by: What error messages call each pattern; ``None``: "keep_local".

    Raises:
        ConfigError: A pattern matches nothing that training changes, or nothing is left to share.

    Example:
        >>> model = nn.Sequential(nn.Linear(3, 2), nn.BatchNorm1d(2), nn.Linear(2, 1))
        >>> find_local_names(model, ["2.*", "type:BatchNorm*"])
        ('1.weight', '1.bias', '2.weight', '2.bias', '1.running_mean', '1.running_var')
    """
    if not patterns:
        return ()
    layout = Layout.of(module)
    names = {**{name: name for name in layout.by_name}, **layout.aliases}
    classes = dict[str, tuple[str, ...]]()
    for prefix, layer in module.named_modules():
        own = (name for name, _ in (*layer.named_parameters(), *layer.named_buffers()))
        kinds = tuple(kind.__name__ for kind in type(layer).__mro__)
        for name in own:
            full = f"{prefix}.{name}".lstrip(".")
            classes[full] = (*classes.get(full, ()), *kinds)
    found = set[str]()
    for pattern in patterns:
        if pattern.startswith(_TYPE):
            kind = pattern.removeprefix(_TYPE)
            matched = {
                layout_name
                for name, layout_name in names.items()
                if any(fnmatchcase(each, kind) for each in classes.get(name, ()))
            }
        else:
            matched = {own for name, own in names.items() if fnmatchcase(name, pattern)}
        matched &= layout.by_name.keys()
        if not matched:
            some = ", ".join(repr(name) for name in list(layout.by_name)[:6])
            more = ", ..." if len(layout.by_name) > 6 else ""  # noqa: PLR2004 - shown above
            who = (named_by or {}).get(pattern, "keep_local")
            raise ConfigError(
                f"{who} has the pattern {pattern!r}, which matches no tensor that training "
                f"changes; the model, {type(module).__name__}, has {some}{more}"
            )
        found |= matched
    if all(spec.name in found for spec in layout.trainable):
        raise ConfigError(
            f"keep_local is {list(patterns)}, which matches every trained parameter, so clients "
            "would share nothing; leave some parameters to share"
        )
    return tuple(name for name in layout.by_name if name in found)


def require_local_parts_allowed(strategy: Strategy, params: Params) -> None:
    """Check that a strategy works if clients keep parts of the model for themselves.

    Raises:
        ConfigError: Its clients send, or it broadcasts, vectors along all trained parameters: the
            server has no values for the local ones.
    """
    if not params.local:
        return
    if along := _list_along_parameters(strategy, params):
        inner = strategy
        while isinstance(inner, StrategyWrapper) and _list_along_parameters(inner.inner, params):
            inner = inner.inner  # name the one that exchanges it
        raise ConfigError(
            f"keep_local is {list(strategy.keep_local)}, but {type(inner).__name__} exchanges "
            f"{along[0]!r}, with a value for each trained parameter, also for those that stay "
            "local; use an algorithm that exchanges only the model, such as FedAvg or FedProx"
        )
    if LOCAL in strategy.local.memory:
        raise ConfigError(
            f"keep_local is on, and the local update has memory called {LOCAL!r}, the name of the "
            "parts that stay local; rename it"
        )


def _list_along_parameters(strategy: Strategy, params: Params) -> list[str]:
    """Return the names of all lanes and broadcast values along parameters, but the model's."""
    lanes = (each for each in strategy.lanes if isinstance(each.over, Over) and each != DELTA)
    return [lane.name for lane in lanes] + [
        name
        for name in strategy.broadcast(strategy.init(params))
        if isinstance(extent_of(name, strategy.broadcasts), Over)
    ]


def insert_local(
    tensors: Mapping[str, Tensor], names: Sequence[str], own: Tensor
) -> dict[str, Tensor]:
    """Replace tensors by a client's own values.

    Args:
        tensors: The model by name, with the initial values of the local tensors.
        names: Names of the local tensors.
        own: The client's values of them, one after another: shape [n].

    Raises:
        ValueError: ``own`` has the wrong size.

    Example:
        >>> model = {"body": torch.zeros(2), "head": torch.zeros(1)}
        >>> insert_local(model, ["head"], torch.tensor([7.0]))["head"]
        tensor([7.])
    """
    sizes = [tensors[name].numel() for name in names]
    if own.shape != (sum(sizes),):
        raise ValueError(
            f"the client's own part of the model has shape {tuple(own.shape)}, but the tensors "
            f"that stay local have {sum(sizes)} numbers; the model or keep_local has changed"
        )
    parts = zip(names, own.split(sizes), strict=True)
    changed = {name: part.view(tensors[name].shape).to(tensors[name]) for name, part in parts}
    return {**tensors, **changed}


def extract_local(tensors: Mapping[str, Tensor], names: Sequence[str]) -> Tensor:
    """Return tensors one after another: shape [n], float64 if one of them is, else float32."""
    parts = [tensors[name].detach().reshape(-1) for name in names]
    is_double = any(part.dtype == torch.float64 for part in parts)
    return torch.cat([part.to(torch.float64 if is_double else torch.float32) for part in parts])


@dataclass(frozen=True)
class LocalParts:
    """Splits the vector of the whole model into the shared part and the local part.

    Attributes:
        whole: Layout of the whole model.
        names: Names of the tensors that stay local, in the order of the vector.

    Example:
        >>> model = nn.Sequential(nn.Linear(1, 1, bias=False), nn.Linear(1, 1, bias=False))
        >>> parts = LocalParts(Layout.of(model), ("1.weight",))
        >>> row = torch.tensor([[3.0, 4.0]])
        >>> parts.select_shared(row), parts.select_local(row)
        (tensor([[3.]]), tensor([[4.]]))
    """

    whole: Layout
    names: tuple[str, ...]

    @classmethod
    def of(cls, params: Params) -> "LocalParts | None":
        """Return the parts of a global model; ``None`` if nothing stays local."""
        return None if params.whole is None else cls(params.whole, params.local)

    @cached_property
    def _spans(self) -> tuple[list[slice], list[slice]]:
        """Columns of the shared and of the local part; neighbouring tensors are one span."""
        found: tuple[list[slice], list[slice]] = ([], [])
        for spec in self.whole.specs:
            spans = found[spec.name in self.names]
            end = spec.offset + spec.size
            if spans and spans[-1].stop == spec.offset:
                spans[-1] = slice(spans[-1].start, end)
            else:
                spans.append(slice(spec.offset, end))
        return found

    @property
    def num_local(self) -> int:
        """Number of elements that stay local."""
        return sum(span.stop - span.start for span in self._spans[1])

    def select_shared(self, rows_KP: Tensor) -> Tensor:
        """Return the shared part of K vectors; a view if it is contiguous."""
        return _select(rows_KP, self._spans[0])

    def select_local(self, rows_KP: Tensor) -> Tensor:
        """Return the local part of K vectors; a view if it is contiguous."""
        return _select(rows_KP, self._spans[1])

    def start(self, params: Params, own: Tensor | None) -> Tensor:
        """Return the vector from which a client starts: shape [P].

        Args:
            params: The global model, without the local part.
            own: The client's local part; ``None``: it has not trained yet.
        """
        whole = params.complete().vector
        if own is not None:
            begin = 0
            for span in self._spans[1]:
                size = span.stop - span.start
                whole[span] = own[begin : begin + size]
                begin += size
        return whole


def _select(rows_KP: Tensor, spans: Sequence[slice]) -> Tensor:
    if len(spans) == 1:
        return rows_KP[:, spans[0]]
    return torch.cat([rows_KP[:, span] for span in spans], dim=1)
