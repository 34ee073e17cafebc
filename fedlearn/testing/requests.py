"""Build the round requests that a fake coordinator sends to clients."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TypeAlias

import torch
from torch import Tensor, nn

from fedlearn.algorithms.collector import RoundRequest
from fedlearn.algorithms.extra_settings import split_settings
from fedlearn.algorithms.local import LocalUpdate
from fedlearn.algorithms.own_training import OwnTraining
from fedlearn.algorithms.recipes import FedAvg
from fedlearn.algorithms.settings import update_from
from fedlearn.algorithms.strategy import Strategy
from fedlearn.core.messages import Settings, TrainRequest
from fedlearn.core.params import Layout, Params, TensorSpec
from fedlearn.errors import SettingsRefused

#: A global model: a module, or its tensors by name.
Model: TypeAlias = nn.Module | Mapping[str, Tensor]


@dataclass(frozen=True, kw_only=True)
class SettingsRequest(RoundRequest):
    """A round that sends clients exactly the given settings, not those of a strategy.

    Attributes:
        settings: How to train.
    """

    settings: Settings

    def message(self) -> TrainRequest:
        """Build the request that clients receive."""
        return replace(super().message(), settings=self.settings)


def build_round(model: Model, training: Settings | Strategy, *, round_num: int) -> RoundRequest:
    """Build a round that asks clients to train with ``training``: settings or a strategy."""
    params = to_params(model)
    if not isinstance(training, Mapping):
        broadcast = training.broadcast(training.init(params))
        return RoundRequest(
            round_num=round_num,
            attempt=0,
            params=params,
            strategy=training,
            broadcast=broadcast,
            seed=0,
        ).compress()
    return SettingsRequest(
        round_num=round_num,
        attempt=0,
        params=params,
        strategy=FedAvg(_parse_local(training)),
        broadcast={},
        seed=0,
        settings=training,
    )


def to_params(model: Model) -> Params:
    """Convert a model to :class:`Params`; in a mapping, all floating-point tensors are averaged."""
    if isinstance(model, nn.Module):
        return Params.of(model)
    averaged = {name: value for name, value in model.items() if value.is_floating_point()}
    is_double = any(value.dtype == torch.float64 for value in averaged.values())
    specs, offset = list[TensorSpec](), 0
    for name, value in averaged.items():
        spec = TensorSpec(name, tuple(value.shape), value.dtype, offset)
        specs.append(spec)
        offset += spec.size
    dtype = torch.float64 if is_double else torch.float32
    dtypes = {spec.dtype for spec in specs}
    common_dtype = dtypes.pop() if len(dtypes) == 1 else None
    layout = Layout(tuple(specs), statistics=(), dtype=dtype, common_dtype=common_dtype)
    constants = {name: value for name, value in model.items() if name not in averaged}
    return Params(layout, layout.pack(averaged), constants)


def _parse_local(settings: Settings) -> LocalUpdate:
    """Parse the local update that settings describe; it determines the lanes of a reply.

    Settings that fedlearn does not understand count as custom training by the client.
    """
    try:
        return update_from(split_settings(settings)[0])
    except SettingsRefused:
        return OwnTraining()
