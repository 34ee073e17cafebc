"""Converts our messages to the records of Flower's own strategies and ClientApps, and back.

Their convention (``flwr.serverapp.strategy`` and the apps written for it): a message has one
``ArrayRecord``, the model as its ``state_dict``, and one ``ConfigRecord`` with ``server-round``,
counted from 1. A reply to training has one ``ArrayRecord``, the local model, and one
``MetricRecord`` with ``num-examples``; a reply to evaluation has only the latter. The keys of these
records do not matter, but we use ``arrays``, ``config`` and ``metrics``, as Flower does.

Guarantees:
    Nothing is unpickled, and the size that an array claims is compared with its actual bytes before
    memory is allocated.
"""

import math
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Literal, Self, TypeVar

import numpy as np
import torch
from flwr.app import Array, ArrayRecord, ConfigRecord, MetricRecord, RecordDict
from torch import Tensor, nn

from fedlearn.algorithms.extra_settings import split_settings
from fedlearn.algorithms.lanes import DELTA
from fedlearn.core.messages import (
    EvaluateReply,
    EvaluateRequest,
    Reply,
    Request,
    Scalar,
    Settings,
    TrainReply,
    TrainRequest,
)
from fedlearn.core.params import compute_delta
from fedlearn.errors import ConfigError, ProtocolError, RoundError

ARRAYS, CONFIG, METRICS = "arrays", "config", "metrics"
#: Keys of a config: the round, from 1, and the seed of our own clients, which is optional.
_ROUND, _SEED = "server-round", "seed"
#: Key of the metrics: the weight of the reply.
NUM_EXAMPLES = "num-examples"
#: The serialization of numpy, which Flower uses, and its header in formats 1.0 and 2.0, for
#: little-endian numbers. Parsed by a pattern, because numpy's own reader evaluates it as Python.
_NPY = "numpy.ndarray"
_NPY_HEADER = re.compile(
    rb"\x93NUMPY(?:\x01\x00[\x00-\xff]{2}|\x02\x00[\x00-\xff]{4})"
    rb"\{'descr': '(?P<dtype>\|b1|\|[iu]1|<[iu][248]|<f[248])', "
    rb"'fortran_order': (?P<by_columns>True|False), "
    rb"'shape': \((?P<shape>(?:[0-9]{1,18}(?:, [0-9]{1,18}){0,31},?)?)\), \} *\n"
)

#: torch's name for the number of batches that a BatchNorm has seen: a count, which is not averaged.
_COUNTER = "num_batches_tracked"

#: Converts a config to training settings.
SettingsOf = Callable[[Settings], Settings]

_RecordT = TypeVar("_RecordT")


@dataclass(frozen=True, kw_only=True)
class StockRecords:
    """Converts requests and replies to and from the records of Flower's own ClientApps.

    Attributes:
        names: For each name in the model's ``state_dict``, in that order, the tensor's name among
            our parameters; it differs if the tensor is shared.
        evaluate_config: Config sent with a model to evaluate, in addition to the round; with a
            model to train, the request's free-form settings are sent.
    """

    names: Mapping[str, str]
    evaluate_config: Settings

    @classmethod
    def of(cls, module: nn.Module, *, evaluate_config: Settings) -> Self:
        """Create the converter for a model.

        Raises:
            ConfigError: A tensor's dtype does not exist in numpy, whose arrays Flower sends.
        """
        own = {id(each): name for name, each in module.named_buffers()}
        own |= {id(each): name for name, each in module.named_parameters()}
        # By default, `state_dict` returns detached copies of the tensor objects, whose ids are
        # new. By id, a shared tensor is found under each of its names.
        saved = module.state_dict(keep_vars=True)
        names = {name: own[id(each)] for name, each in saved.items() if id(each) in own}
        for name in names:
            if (dtype := saved[name].dtype) in _BEYOND_NUMPY:
                raise ConfigError(
                    f"the model's tensor {name!r} is {dtype}, which numpy does not have, "
                    'and Flower sends numpy arrays; with flower.client_apps = "flower", use '
                    "tensors of float16, float32 or float64"
                )
        return cls(names=names, evaluate_config=evaluate_config)

    def content(self, request: Request) -> RecordDict:
        """Convert a request to records.

        Raises:
            RoundError: It contains something that these apps do not support.
        """
        match request:
            case TrainRequest(broadcast=broadcast) if not broadcast:
                round_num, (_, config) = request.round_num + 1, split_settings(request.settings)
            case TrainRequest(broadcast=broadcast):
                raise RoundError(
                    f"the strategy broadcasts {min(broadcast)!r} along with the model, which "
                    "Flower's ClientApps do not read; use another strategy, or set "
                    'flower.client_apps to "fedlearn"'
                )
            case EvaluateRequest():
                round_num, config = request.round_num, self.evaluate_config
            case _:
                raise RoundError(f"Flower's ClientApps do not answer a {type(request).__name__}")
        arrays = {name: _encode_array(request.tensors[own]) for name, own in self.names.items()}
        config_record = ConfigRecord({**_drop_none(config), _ROUND: round_num})
        return RecordDict({ARRAYS: ArrayRecord(arrays), CONFIG: config_record})

    def reply(self, content: RecordDict, request: Request) -> Reply:
        """Convert a client's records to a reply.

        Raises:
            ProtocolError: They are not a reply: records, names, shapes or dtypes differ.
        """
        record = _get_only(content.metric_records, "MetricRecord")
        num_examples, metrics = _read_num_examples(record), _read_scalars(record)
        if isinstance(request, EvaluateRequest):
            return EvaluateReply(
                round_num=request.round_num, num_examples=num_examples, metrics=metrics
            )
        assert isinstance(request, TrainRequest)  # what was sent
        arrays, local = self._read_arrays(content), dict[str, Tensor]()
        for name, own in self.names.items():
            sent, local[own] = request.tensors[own], _decode_array(arrays[name], name)
            if local[own].shape != sent.shape or local[own].dtype != sent.dtype:
                raise ProtocolError(
                    f"the array {name!r} is {_describe_tensor(local[own])}, but "
                    f"{_describe_tensor(sent)} was sent{_advise_on_dtype(local[own], sent)}"
                )
        delta = compute_delta(local, request.tensors, order=request.order)
        return TrainReply(
            round_num=request.round_num,
            lanes={DELTA.name: delta},
            num_examples=num_examples,
            metrics=metrics,
        )

    def _read_arrays(self, content: RecordDict) -> Mapping[str, Array]:
        """Return the arrays of a local model by their names in its ``state_dict``.

        An app that trains a list of arrays sends a list, whose keys are indices: the order is that
        in which the arrays were sent.

        Raises:
            ProtocolError: The arrays are not those of the model.
        """
        arrays = _get_only(content.array_records, "ArrayRecord")
        if arrays.keys() == {str(place) for place in range(len(self.names))}:
            return {name: arrays[str(place)] for place, name in enumerate(self.names)}
        if all(name.isdecimal() for name in arrays):
            raise ProtocolError(
                f"the reply lists {len(arrays)} arrays, but the model has {len(self.names)} tensors"
            )
        if arrays.keys() != self.names.keys():
            wrong = sorted(arrays.keys() ^ self.names.keys())[:3]
            raise ProtocolError(f"the reply lacks or adds arrays: {wrong}")
        return arrays


def parse_train_request(content: RecordDict, *, settings_of: SettingsOf, seed: int) -> TrainRequest:
    """Convert a training message of one of Flower's strategies to a request.

    Args:
        content: Of the message.
        settings_of: Converts a config to training settings.
        seed: A public seed, used if the config has none.

    Raises:
        ProtocolError: The message is not understood.
        SettingsRefused: ``settings_of`` refuses the config.
    """
    _require_present(content)
    tensors, config = _decode_arrays(content), _read_config(content)
    seed = _require_whole(config.pop(_SEED, seed), _SEED)
    round_num = _pop_round(config)
    return TrainRequest(
        # Flower counts rounds from 1.
        round_num=round_num - 1,
        attempt=0,
        tensors=tensors,
        order=[name for name, value in tensors.items() if value.is_floating_point()],
        settings=settings_of(config),
        seed=seed,
    )


def parse_evaluate_request(content: RecordDict) -> EvaluateRequest:
    """Convert an evaluation message of one of Flower's strategies to a request.

    Raises:
        ProtocolError: The message is not understood.
    """
    _require_present(content)
    return EvaluateRequest(
        round_num=_pop_round(_read_config(content)), tensors=_decode_arrays(content)
    )


def build_train_records(
    reply: TrainReply, request: TrainRequest, content: RecordDict
) -> RecordDict:
    """Build the records of a training reply; the arrays keep the key of the message's arrays."""
    (key,) = content.array_records
    delta, local = reply.lanes[DELTA.name], dict(request.tensors)
    sizes = [request.tensors[name].numel() for name in request.order]
    for name, part in zip(request.order, delta.split(sizes), strict=True):
        start = request.tensors[name]
        local[name] = (start.to(delta.dtype) + part.view(start.shape)).to(start.dtype)
    arrays = ArrayRecord({name: _encode_array(value) for name, value in local.items()})
    return RecordDict({key: arrays, METRICS: _build_metrics(reply)})


def build_evaluate_records(reply: EvaluateReply) -> RecordDict:
    """Build the records of an evaluation reply."""
    return RecordDict({METRICS: _build_metrics(reply)})


def _require_present(content: RecordDict) -> None:
    """Refuse a message of a strategy of Flower's earlier API.

    Raises:
        ProtocolError: It is such a message.
    """
    if any(name in content.config_records for name in ("fitins.config", "evaluateins.config")):
        raise ProtocolError(
            "the ServerApp is a legacy app (server_fn, flwr.server.strategy), which does not name "
            "the model's arrays; use a strategy of flwr.serverapp.strategy, or fedlearn's "
            "ServerApp"
        )


# -- arrays --

_BEYOND_NUMPY = frozenset(
    dtype
    for name in dir(torch)
    if isinstance(dtype := getattr(torch, name), torch.dtype)
    and (name.startswith("float8") or name == "bfloat16")
)


def _encode_array(value: Tensor) -> Array:
    return Array(np.asarray(value.detach().cpu().contiguous().numpy()))


def _decode_arrays(content: RecordDict) -> dict[str, Tensor]:
    record = _get_only(content.array_records, "ArrayRecord")
    tensors = {name: _decode_array(array, name) for name, array in record.items()}
    for name, value in tensors.items():
        # Flower's strategies average these counts as well, in float64: make them integers again.
        if name.rpartition(".")[2] == _COUNTER and value.is_floating_point():
            tensors[name] = value.round().long()
    return tensors


def _decode_array(array: Array, name: str) -> Tensor:
    """Decode an array in numpy's format; allocate no more memory than it has bytes."""
    if array.stype != _NPY:
        raise ProtocolError(f"the array {name!r} has the type {array.stype!r}, not {_NPY!r}")
    found = _NPY_HEADER.match(array.data)
    if found is None:
        raise ProtocolError(
            f"the array {name!r} is not in numpy's format, or has numbers that torch does not have"
        )
    dtype, shape = np.dtype(found["dtype"].decode()), _parse_shape(found["shape"])
    data = memoryview(array.data)[found.end() :]
    if math.prod(shape) * dtype.itemsize != len(data):
        raise ProtocolError(
            f"the array {name!r} has {len(data)} bytes, but says that it is {dtype} of shape "
            f"{shape}"
        )
    order: Literal["F", "C"] = "F" if found["by_columns"] == b"True" else "C"
    try:
        values = np.frombuffer(data, dtype=dtype).reshape(shape, order=order)
    except ValueError as error:  # an empty array with a dimension above the largest index
        raise ProtocolError(f"the array {name!r} has the shape {shape}: {error}") from error
    return torch.from_numpy(np.array(values, order="C"))  # a copy: the bytes cannot be written to


def _parse_shape(text: bytes) -> tuple[int, ...]:
    return tuple(int(each) for each in text.split(b",") if each.strip())


def _advise_on_dtype(value: Tensor, sent: Tensor) -> str:
    """Return advice for an array in float64, numpy's default dtype; otherwise an empty text."""
    if value.shape != sent.shape or value.dtype != torch.float64:
        return ""
    return "; have model.factory build the model in torch.float64, or convert the array"


def _describe_tensor(value: Tensor) -> str:
    return f"{value.dtype} of shape {tuple(value.shape)}"


# -- configs and metrics --


def _get_only(records: Mapping[str, _RecordT], kind: str) -> _RecordT:
    if len(records) != 1:
        raise ProtocolError(
            f"the message has {len(records)} records of the type {kind}; Flower's strategies and "
            "ClientApps send one"
        )
    return next(iter(records.values()))


def _drop_none(config: Settings) -> dict[str, int | float | str | bytes | list[int]]:
    return {name: value for name, value in config.items() if value is not None}


def _read_config(content: RecordDict) -> dict[str, Scalar]:
    config = dict[str, Scalar]()
    for name, value in _get_only(content.config_records, "ConfigRecord").items():
        if not isinstance(value, bool | int | float | str):
            raise ProtocolError(
                f"the config's {name!r} is {type(value).__name__}; it must be a number, a string "
                "or a bool"
            )
        config[name] = value
    return config


def _pop_round(config: dict[str, Scalar]) -> int:
    round_num = _require_whole(config.pop(_ROUND, None), _ROUND)
    if round_num < 1:
        raise ProtocolError(f"the config's {_ROUND!r} is {round_num}; rounds count from 1")
    return round_num


def _require_whole(value: Scalar, name: str) -> int:
    if type(value) is not int or not 0 <= value < 1 << 63:
        raise ProtocolError(
            f"the config's {name!r} is {value!r}; it must be an integer in [0, 2**63), as in "
            "Flower's strategies"
        )
    return value


def _read_num_examples(record: MetricRecord) -> int:
    value = record.get(NUM_EXAMPLES)
    if isinstance(value, int) or (isinstance(value, float) and value.is_integer()):
        return int(value)
    raise ProtocolError(
        f"the metric {NUM_EXAMPLES!r} is {value!r}; it must be the number of examples, the "
        "client's weight"
    )


def _read_scalars(record: MetricRecord) -> dict[str, float]:
    return {
        name: float(value)
        for name, value in record.items()
        if name != NUM_EXAMPLES and not isinstance(value, list)
    }


def _build_metrics(reply: TrainReply | EvaluateReply) -> MetricRecord:
    return MetricRecord({**reply.metrics, NUM_EXAMPLES: reply.num_examples})
