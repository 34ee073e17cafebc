"""Check a trainer's result on the client and build the reply that is sent to the coordinator.

A result that the coordinator would refuse fails here, where the user sees why.
"""

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from fedlearn.algorithms.compression import (
    Compressor,
    Sent,
    find_compressor,
    join_kept,
    lanes_to_sum,
    send_updates,
    split_kept,
)
from fedlearn.algorithms.lanes import DELTA, Updates
from fedlearn.algorithms.local_parts import LOCAL, extract_local
from fedlearn.algorithms.settings import (
    has_own_noise,
    require_honored,
    transforms_from,
    without_transforms,
)
from fedlearn.algorithms.transforms import Transform
from fedlearn.core.messages import EvaluateReply, TrainReply, TrainRequest
from fedlearn.core.params import compute_delta
from fedlearn.core.soundness import describe_unsound, is_sound
from fedlearn.errors import Diverged, UnusableResult
from fedlearn.training.trainer import LocalEvaluation, LocalResult, LocalTrainer, TrainContext


def train_and_reply(
    trainer: LocalTrainer,
    request: TrainRequest,
    *,
    context: TrainContext,
    known: Collection[type[Transform]] = (),
    is_masked: bool = False,
) -> tuple[TrainReply, dict[str, Tensor]]:
    """Train on a request; return the reply and the state that the client keeps.

    Converts NumPy arrays and floating-point values of other precisions, and applies the request's
    transforms. If clients add noise themselves, the reply carries no metrics and counts one
    example, since neither value is noised.

    Args:
        trainer: The trainer.
        request: The coordinator's request.
        context: The context passed to the trainer.
        known: Custom transforms that the coordinator may ask for.
        is_masked: Whether the update goes into a secure sum, which takes every number of it, so
            that only a part that can be added takes its place.

    Raises:
        SettingsRefused: The trainer would ignore one of the requested settings, or a transform is
            unknown.
        UnusableResult: The coordinator would refuse the result, or the trainer changed tensors that
            it must not change.
        Diverged: The update has values that are not finite.
    """
    transforms = transforms_from(request.settings, known=known)
    settings = without_transforms(request.settings, known=known)
    require_honored(settings, trainer.honors, who=type(trainer).__name__)
    own_state, kept = split_kept(context.state)
    # Simulated clients share these tensors, so a trainer must not write to them.
    sent = _mark_tensors(request.tensors)
    result = trainer.train(request.tensors, context=replace(context, state=own_state))
    if not isinstance(result, LocalResult):
        raise UnusableResult(f"the trainer returned {type(result).__name__}, not a LocalResult")
    _require_unchanged(request.tensors, sent)
    delta = _compute_delta(result.tensors, request)
    # A request without a model is a query, whose answer has no delta.
    lanes = {DELTA.name: delta} if request.order else {}
    for name, values in result.lanes.items():
        if name == DELTA.name:
            raise UnusableResult(f"the trainer returned a lane {name!r}, a reserved name")
        vector = _to_tensor(values, what=f"lane {name!r}").to(delta)
        lanes[name] = vector.reshape(-1)
    leaving = _apply_transforms(lanes, transforms, context, request, kept)
    lanes = {name: rows[0] for name, rows in leaving.updates.lanes.items()}
    # After the transforms: what leaves the client is what the coordinator checks.
    for name, vector in lanes.items():
        if not is_sound(vector):
            raise Diverged(describe_unsound(name))
    num_examples, metrics = _require_count(result.num_examples), _require_metrics(result.metrics)
    if has_own_noise(request.settings):
        # The noise covers the update alone; exact counts and metrics would leak past it.
        num_examples, metrics = 1, {}
    reply = TrainReply(
        round_num=request.round_num,
        lanes=lanes,
        num_examples=num_examples,
        metrics=metrics,
    )
    if (compressor := find_compressor(transforms)) is not None:
        reply = _compress(reply, leaving, compressor, is_masked=is_masked)
    state = {
        name: _to_tensor(value, what=f"state {name!r}") for name, value in result.state.items()
    }
    if request.local:
        if LOCAL in state:
            raise UnusableResult(
                f"the trainer keeps a state called {LOCAL!r}, the name of the parts of the model "
                "that stay on this client; rename it"
            )
        state[LOCAL] = extract_local(
            _check_tensors(result.tensors, request, request.local), request.local
        )
    return reply, join_kept(state, {name: rows[0] for name, rows in leaving.kept.items()})


def _compress(
    reply: TrainReply, leaving: Sent, compressor: Compressor, *, is_masked: bool
) -> TrainReply:
    if not is_masked:
        return replace(reply, lanes=leaving.lanes_on_wire(), encoding=compressor.encoding)
    if not compressor.summed_part:
        return reply
    lanes = lanes_to_sum(leaving, compressor)
    return replace(reply, lanes={name: rows[0] for name, rows in lanes.items()})


def fine_tune(
    trainer: LocalTrainer, tensors: Mapping[str, Tensor], *, context: TrainContext
) -> Mapping[str, Tensor]:
    """Train a copy of a model, only to evaluate it; return it by name.

    Raises:
        SettingsRefused: The trainer would ignore one of the settings.
        UnusableResult: The trainer returned something else, or changed the tensors it was given.
    """
    require_honored(context.settings, trainer.honors, who=type(trainer).__name__)
    given = _mark_tensors(tensors)
    result = trainer.train(tensors, context=context)
    if not isinstance(result, LocalResult):
        raise UnusableResult(f"the trainer returned {type(result).__name__}, not a LocalResult")
    _require_unchanged(tensors, given)
    found = {name: _to_tensor(value, what=repr(name)) for name, value in result.tensors.items()}
    return {**tensors, **found}


def build_evaluate_reply(result: LocalEvaluation, *, round_num: int) -> EvaluateReply:
    """Check an evaluation's result and build the reply.

    Raises:
        UnusableResult: The result is not a LocalEvaluation, has no examples, or has a metric that
            is not a number or is infinite.
    """
    if not isinstance(result, LocalEvaluation):
        raise UnusableResult(f"the trainer returned {type(result).__name__}, not a LocalEvaluation")
    return EvaluateReply(
        round_num=round_num,
        num_examples=_require_count(result.num_examples),
        metrics=_require_metrics(result.metrics),
    )


class _Mark(NamedTuple):
    """A cheap fingerprint that shows whether a tensor was changed.

    torch counts its in-place writes in ``version``, which all views of a tensor share. Writes that
    bypass the counter, through NumPy or ``.data``, show only in ``total``, the sum of the tensor's
    words. A change that keeps the sum, such as a permutation, goes unnoticed there.
    """

    total: int
    version: int


def _mark_tensors(tensors: Mapping[str, Tensor]) -> dict[str, _Mark]:
    return {name: _Mark(_sum_words(each), each._version) for name, each in tensors.items()}  # noqa: SLF001 - as autograd checks


def _sum_words(value: Tensor) -> int:
    octets = value.detach().contiguous().view(-1).view(torch.uint8)
    # In words of four bytes there are four times fewer numbers to add.
    words = octets.view(torch.int32) if octets.numel() % 4 == 0 else octets
    return int(words.sum(dtype=torch.int64))


def _require_unchanged(tensors: Mapping[str, Tensor], sent: Mapping[str, _Mark]) -> None:
    marks = _mark_tensors(tensors)
    # Views of one tensor share a version, so a changed total names the culprit more precisely.
    other_totals = [name for name, mark in marks.items() if mark.total != sent[name].total]
    changed = other_totals or [name for name, mark in marks.items() if mark != sent[name]]
    if changed:
        raise UnusableResult(
            f"the trainer changed the tensor {changed[0]!r} that it was given; train on a copy, "
            "such as model.load_state_dict(tensors), without assign=True"
        )


def _compute_delta(tensors: Mapping[str, Tensor], request: TrainRequest) -> Tensor:
    """Compute local minus global as one vector in the model's widest precision."""
    local = _check_tensors(tensors, request, request.order)
    _require_frozen(tensors, request)
    return compute_delta(local, request.tensors, order=request.order)


def _check_tensors(
    tensors: Mapping[str, Tensor], request: TrainRequest, names: Sequence[str]
) -> dict[str, Tensor]:
    """Check some tensors of the trained model, and return them by name."""
    missing = [name for name in names if name not in tensors]
    if missing:
        raise UnusableResult(
            f"the trainer returned no tensor {missing[0]!r} ({len(missing)} are missing); return "
            "every parameter and every floating-point buffer of the model that the coordinator "
            "does not freeze"
        )
    unknown = [name for name in tensors if name not in request.tensors]
    if unknown:
        raise UnusableResult(f"the trainer returned {unknown[0]!r}, which the model does not have")
    local = dict[str, Tensor]()
    for name in names:
        local[name], start = _to_tensor(tensors[name], what=repr(name)), request.tensors[name]
        if local[name].shape != start.shape:
            raise UnusableResult(
                f"the trainer returned {name!r} of shape {tuple(local[name].shape)}, but the "
                f"model's is {tuple(start.shape)}"
            )
        if not local[name].is_floating_point():
            raise UnusableResult(
                f"the trainer returned {name!r} as {local[name].dtype}; it must be a float"
            )
    return local


def _require_frozen(tensors: Mapping[str, Tensor], request: TrainRequest) -> None:
    """Refuse a result that changed a frozen tensor, since the change would be dropped silently.

    Integer buffers, such as counters, may change; the coordinator keeps its own.
    """
    changing = {*request.order, *request.local}
    for name, value in tensors.items():
        sent = request.tensors[name]
        if name in changing or value is sent or not (sent.is_floating_point() or sent.is_complex()):
            continue
        if not _is_same(_to_tensor(value, what=repr(name)).to(sent), sent):
            raise UnusableResult(
                f"the trainer changed {name!r}, which is frozen in the coordinator's model: the "
                "change would be lost; train the same parameters as the coordinator, with the same "
                "requires_grad"
            )


def _is_same(found: Tensor, sent: Tensor) -> bool:
    """Compare two tensors by value, with NaN equal to NaN."""
    if sent.itemsize == 1:  # torch cannot compare float8 tensors
        found, sent = found.float(), sent.float()
    if found.shape != sent.shape:
        return False
    return bool(((found == sent) | (found.isnan() & sent.isnan())).all())


def _to_tensor(value: object, *, what: str) -> Tensor:
    if isinstance(value, np.ndarray | np.generic):
        try:
            # Copy: torch accepts neither negative strides nor read-only arrays.
            value = torch.from_numpy(np.array(value, order="C"))
        except (TypeError, ValueError) as error:
            raise UnusableResult(
                f"the trainer returned {what}, which is not numeric: {error}"
            ) from error
    if not isinstance(value, Tensor):
        raise UnusableResult(
            f"the trainer returned {what} as {type(value).__name__}, not as a tensor"
        )
    return value.detach()


def _apply_transforms(
    lanes: Mapping[str, Tensor],
    transforms: Sequence[Transform],
    context: TrainContext,
    request: TrainRequest,
    kept: Mapping[str, Tensor],
) -> Sent:
    updates = Updates(
        client_ids=[context.client_id],
        weights_B=torch.ones(1),
        lanes={name: vector[None] for name, vector in lanes.items()},
        based_on=[request.round_num],
        num_trained=request.num_trained,
        shapes=request.trained_shapes,
    )
    rows = {name: value[None] for name, value in kept.items()}
    return send_updates(updates, transforms, rows, seed=context.seed, round_num=request.round_num)


def _require_count(value: object) -> int:
    # In Python a bool is an int.
    if isinstance(value, int | np.integer) and not isinstance(value, bool) and int(value) >= 1:
        return int(value)
    raise UnusableResult(f"num_examples is {value!r}; it must be a whole number >= 1")


def _require_metrics(metrics: Mapping[str, object]) -> dict[str, float]:
    found = {}
    for name, value in metrics.items():
        number = value
        if (isinstance(value, Tensor) and value.numel() == 1) or (
            isinstance(value, np.ndarray) and value.size == 1
        ):
            number = value.item()
        if not isinstance(number, float | int | np.floating | np.integer | np.bool_):
            raise UnusableResult(
                f"the metric {name!r} is {type(value).__name__}; a metric must be a number"
            )
        found[name] = float(number)
        if math.isinf(found[name]):
            raise UnusableResult(f"the metric {name!r} is infinite; a metric must be finite")
    return found
