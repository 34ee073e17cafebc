"""No reply of a client can stop a round or reach arithmetic unchecked."""

import json
import re
import struct
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import safetensors.torch
import structlog
import torch
from torch import Tensor, nn

from fedlearn.algorithms.bounds import GENEROUS, UpdateBounds
from fedlearn.algorithms.collector import GlobalModel
from fedlearn.algorithms.local import LocalSgd
from fedlearn.algorithms.quantization import Quantized
from fedlearn.algorithms.recipes import FedAvg, Scaffold
from fedlearn.algorithms.sampling import UniformSampler
from fedlearn.algorithms.stragglers import BelowMinimum, StragglerPolicy
from fedlearn.algorithms.strategy import Bounded, Strategy
from fedlearn.algorithms.top_k import TopK
from fedlearn.core.clock import VirtualClock
from fedlearn.core.codec import VERSION, encode
from fedlearn.core.messages import (
    ClientId,
    EvaluateReply,
    EvaluateRequest,
    Failure,
    TrainReply,
)
from fedlearn.core.params import Params
from fedlearn.core.participations import MAX_REASON, Participation, Status
from fedlearn.core.randomness import Seed
from fedlearn.core.soundness import describe_unsound
from fedlearn.errors import ProtocolError
from fedlearn.rounds.evaluation import ChannelEvaluator
from fedlearn.rounds.opening import SampledOpening
from fedlearn.rounds.plain import PlainCollector
from fedlearn.rounds.round import RoundPlan, run_round
from fedlearn.session.session import ClientSession
from fedlearn.training.trainer import LocalEvaluation, LocalResult, TaskControl, TrainContext
from fedlearn.transport.base import decode_reply
from fedlearn.transport.memory import Handler, MemoryChannel

HOSTILE, NUM_CLIENTS = ClientId(2), 4
#: A failure that a client reports itself.
STRATEGY = FedAvg(LocalSgd(epochs=1, batch_size=None, learning_rate=1.0))
OWN_FAILURE = encode(Failure("battery low"))
#: The update of a linear layer with two weights and a bias.
ZERO = {"delta": torch.zeros(3)}
FEDAVG = FedAvg(LocalSgd(epochs=1, batch_size=1, learning_rate=0.1))


def reply(
    lanes: Mapping[str, Tensor] | None = None,
    *,
    round_num: int = 0,
    num_examples: int = 5,
    metrics: Mapping[str, float] | None = None,
) -> bytes:
    return encode(
        TrainReply(
            round_num=round_num,
            lanes=ZERO if lanes is None else lanes,
            num_examples=num_examples,
            metrics=metrics or {"loss": 1.0},
        )
    )


def raw(header: Mapping[str, Any], tensors: bytes) -> bytes:  # Any: JSON
    data = json.dumps(header).encode()
    return struct.pack("<2sBI", b"FL", VERSION, len(data)) + data + tensors


def raw_reply(**fields: Any) -> bytes:  # Any: JSON
    good = {"round_num": 0, "num_examples": 5, "metrics": {}}
    header = {"kind": "train_reply", "fields": good | fields}
    return raw(header, safetensors.torch.save(ZERO))


def with_element(value: float) -> Mapping[str, Tensor]:
    return {"delta": torch.tensor([0.0, value, 0.0])}


def says_that_it_failed(answer: bytes) -> bool:
    try:
        return isinstance(decode_reply(answer), Failure)
    except ProtocolError:
        return False


def one_round(
    answer: bytes | Handler, *, strategy: Strategy = FEDAVG
) -> tuple[Params, dict[ClientId, Participation]]:
    """Run a round in which one client sends this answer and the others contribute ones.

    Checks that a client that is not in the mean, and did not report a failure itself, hears the
    recorded reason.
    """
    ones = reply({lane.name: torch.ones(3) for lane in strategy.lanes})

    def honest(_: bytes, state: bytes) -> tuple[bytes, bytes]:
        return ones, state

    clients = [ClientId(i) for i in range(NUM_CLIENTS)]
    handlers: dict[ClientId, Handler] = dict.fromkeys(clients, honest)
    handlers[HOSTILE] = (lambda _, state: (answer, state)) if isinstance(answer, bytes) else answer
    policy = StragglerPolicy(
        num_wanted=NUM_CLIENTS,
        over_selection=1.0,
        deadline_s=10.0,
        min_reports=1,
        below_minimum=BelowMinimum.FAIL,
        max_retries=0,
    )
    channel = MemoryChannel(handlers, lambda c, _: np.zeros(len(c)), VirtualClock())
    collector = PlainCollector(channel=channel, policy=policy, slab_bytes=1 << 20)
    plan = RoundPlan(
        draw=SampledOpening(
            sampler=UniformSampler(), available=collector.available, seed=Seed(0)
        ).draw_cohort,
        policy=policy,
        collector=collector,
        strategy=strategy,
        seed=Seed(0),
    )
    params = Params.of(nn.Linear(2, 1))
    start = plan.init(params.with_vector(torch.zeros_like(params.vector)))
    ran = run_round(start, plan, attempt=0)
    participations = {p.client_id: p for p in ran.collected.participations}
    if isinstance(answer, bytes):
        hostile = participations[HOSTILE]
        is_refused = hostile.status is Status.FAILED and not says_that_it_failed(answer)
        assert channel.refused == ({HOSTILE: hostile.reason} if is_refused else {})
    return ran.state.params, participations


HOSTILE_REPLIES: dict[str, tuple[bytes, str]] = {
    "an earlier round": (reply(round_num=7), "reply to round 7 in round 0"),
    "a missing lane": (reply({}), r"missing or extra.*'delta'"),
    "an extra lane": (reply({**ZERO, "extra": torch.zeros(1)}), r"missing or extra.*'extra'"),
    "a renamed lane": (reply({"Delta": torch.zeros(3)}), r"missing or extra.*'Delta', 'delta'"),
    "tensors under their own names": (
        reply({"weight": torch.zeros(1, 2), "bias": torch.zeros(1)}),
        r"missing or extra.*'bias', 'delta', 'weight'",
    ),
    "too few elements": (reply({"delta": torch.zeros(2)}), r"shape \(2,\)"),
    "too many elements": (reply({"delta": torch.zeros(4)}), r"shape \(4,\)"),
    "another shape": (reply({"delta": torch.zeros(3, 1)}), r"shape \(3, 1\)"),
    "a shape that broadcasts": (reply({"delta": torch.zeros(())}), r"shape \(\)"),
    "one element that broadcasts": (reply({"delta": torch.zeros(1)}), r"shape \(1,\)"),
    "another dtype": (reply({"delta": torch.zeros(3).double()}), r"torch\.float64"),
    "integers": (reply({"delta": torch.zeros(3).long()}), r"torch\.int64"),
    "complex numbers": (reply({"delta": torch.zeros(3) + 0j}), r"torch\.complex64"),
    "not a number": (reply(with_element(float("nan"))), "not finite"),
    "infinity": (reply(with_element(float("inf"))), "not finite"),
    "negative infinity": (reply(with_element(float("-inf"))), "not finite"),
    "a number that overflows a sum": (reply(with_element(1e21)), "exceeds 1e\\+20"),
    "no examples": (reply(num_examples=0), "num_examples 0 is not in"),
    "absurd examples": (reply(num_examples=10**8 + 1), "num_examples 100000001"),
    "what ruined a model once": (
        reply(with_element(9e16), num_examples=10**8),
        r"the norm of the delta exceeds 1e\+08 \(updates\.max_norm\)",
    ),
    "long, and of small elements": (
        reply({"delta": torch.full((3,), 0.6e8)}),
        "the norm of the delta exceeds",
    ),
    "negative examples": (raw_reply(num_examples=-1), "num_examples is not an integer"),
    "a fraction of an example": (raw_reply(num_examples=0.5), "num_examples is not an integer"),
    "a loss beyond floats": (raw_reply(metrics={"loss": 10**400}), "too large"),
    "a loss in words": (raw_reply(metrics={"loss": "low"}), "metrics"),
    "another answer": (
        encode(EvaluateReply(round_num=0, num_examples=1, metrics={})),
        "EvaluateReply is not a reply",
    ),
    "a request": (encode(EvaluateRequest(round_num=0, tensors=ZERO)), "is not a reply"),
    "nothing": (b"", "0 bytes"),
    "garbage": (bytes(range(256)), "begins with"),
    "half a reply": (reply()[:-3], "malformed"),
    "a pickle": (b"\x80\x04\x95", "too few for a message"),
    "a tensor of impossible shape": (
        raw(
            {
                "kind": "train_reply",
                "fields": {"round_num": 0, "num_examples": 5, "metrics": {}},
            },
            struct.pack("<Q", 64)
            + b'{"w":{"dtype":"F32","shape":[0,1e0],"data_offsets":[0,0]}}'.ljust(64),
        ),
        "malformed tensors",
    ),
    "a failure of its own": (OWN_FAILURE, "battery low"),
}


@pytest.mark.parametrize("name", list(HOSTILE_REPLIES))
def test_the_round_goes_on_without_a_hostile_client(name: str) -> None:
    """It is recorded with the reason, and the model is that of the others, bit for bit."""
    answer, reason = HOSTILE_REPLIES[name]
    params, participations = one_round(answer)
    hostile = participations.pop(HOSTILE)
    assert hostile.status is Status.FAILED
    assert len(hostile.reason) <= MAX_REASON
    assert re.search(reason, hostile.reason), hostile.reason
    assert {p.status for p in participations.values()} == {Status.REPORTED}
    assert params.vector.tolist() == [1.0, 1.0, 1.0]


HOSTILE_CONTROLS: dict[str, tuple[Mapping[str, Tensor], str]] = {
    "none": ({}, r"missing or extra.*'control'"),
    "too short": ({"control": torch.zeros(2)}, r"'control' has shape \(2,\)"),
    "of another dtype": ({"control": torch.zeros(3).double()}, r"'control' is torch\.float64"),
    "not a number": ({"control": torch.full((3,), float("nan"))}, "the control is not finite"),
    "too large": ({"control": torch.full((3,), 1e21)}, r"the control .*exceeds 1e\+20"),
}


@pytest.mark.parametrize("name", list(HOSTILE_CONTROLS))
def test_a_lane_beside_the_delta_is_checked_as_the_delta_is(name: str) -> None:
    """Even if its delta is valid. Control: a reply whose other lane is valid as well."""
    strategy = Scaffold(
        LocalSgd(epochs=1, batch_size=1, learning_rate=0.1),
        num_clients=NUM_CLIENTS,
        server_learning_rate=1.0,
    )
    control, reason = HOSTILE_CONTROLS[name]
    params, participations = one_round(reply({**ZERO, **control}), strategy=strategy)
    assert participations[HOSTILE].status is Status.FAILED
    assert re.search(reason, participations[HOSTILE].reason), participations[HOSTILE].reason
    assert params.vector.tolist() == [1.0, 1.0, 1.0]
    _, participations = one_round(reply({**ZERO, "control": torch.zeros(3)}), strategy=strategy)
    assert participations[HOSTILE].status is Status.REPORTED


@pytest.mark.parametrize(
    "answer",
    [
        reply(),
        reply(num_examples=GENEROUS.max_examples),
        reply(num_examples=1),
        reply(metrics={"loss": float("nan"), "more": 1.0}),
        raw_reply(metrics={}),
    ],
)
def test_a_reply_at_the_limits_is_accepted(answer: bytes) -> None:
    """Control: unusual but honest replies count."""
    params, participations = one_round(answer)
    assert participations[HOSTILE].status is Status.REPORTED
    assert bool((params.vector < 1.0).all()), "its zero delta is in the mean"


@pytest.mark.parametrize(
    ("length", "num_examples", "status"),
    [(2.0, 5, Status.REPORTED), (2.001, 5, Status.FAILED), (2.0, 6, Status.FAILED)],
)
def test_bounds_of_ones_own_are_kept_to_the_last_example(
    length: float, num_examples: int, status: Status
) -> None:
    bounded = Bounded(FEDAVG, UpdateBounds(max_norm=2.0, max_examples=5))
    answer = reply(with_element(-length), num_examples=num_examples)
    _, participations = one_round(answer, strategy=bounded)
    assert participations[HOSTILE].status is status


def test_a_reason_is_cut_to_a_length_that_can_be_stored() -> None:
    """A peer chooses the reason, so ten megabytes could otherwise end up in every record."""
    for answer in (
        encode(Failure("x" * 10_000_000)),
        raw({"kind": "y" * 10_000_000, "fields": {}}, safetensors.torch.save({})),
        reply({"z" * 1_000_000: torch.zeros(1)}),
    ):
        _, participations = one_round(answer)
        assert len(participations[HOSTILE].reason) == MAX_REASON


class Leaking:
    """Custom code whose error message quotes an example."""

    honors = ("epochs", "batch_size", "learning_rate")

    def train(self, tensors: Mapping[str, Tensor], *, context: TrainContext) -> LocalResult:
        raise ValueError(f"bad row: patient Alice, weight {tensors['weight'].tolist()}")

    def evaluate(self, tensors: Mapping[str, Tensor], *, control: TaskControl) -> LocalEvaluation:
        raise ValueError("patient Alice")


def test_a_handler_that_raises_is_a_failure_without_its_message() -> None:
    """The message may quote data or parameters, so only the error's type is sent.

    The full error is in the client's own log.
    """
    with structlog.testing.capture_logs() as logs:
        params, participations = one_round(ClientSession(HOSTILE, Leaking()).handle)
    assert participations[HOSTILE].status is Status.FAILED
    assert participations[HOSTILE].reason == "ValueError"
    assert params.vector.tolist() == [1.0, 1.0, 1.0]
    assert [entry["client_id"] for entry in logs] == [HOSTILE]


class Diverging(Leaking):
    """Custom code that returns a model with a NaN and a wrong number of examples."""

    honors = ("epochs", "batch_size", "learning_rate")

    def train(self, tensors: Mapping[str, Tensor], *, context: TrainContext) -> LocalResult:
        broken = {name: value / 0.0 for name, value in tensors.items()}
        return LocalResult(tensors=broken, num_examples=3, metrics={}, state={})


def test_a_diverged_client_is_quarantined() -> None:
    """In a real session, not with hand-made bytes."""
    params, participations = one_round(ClientSession(HOSTILE, Diverging()).handle)
    assert participations[HOSTILE].reason == describe_unsound("delta")
    assert params.vector.tolist() == [1.0, 1.0, 1.0]


#: Answers that are valid, but have no measure to count.
COUNTED = (
    encode(EvaluateReply(round_num=1, num_examples=1, metrics={"loss": float("nan")})),
    OWN_FAILURE,
)


@pytest.mark.parametrize(
    "answer",
    [
        b"garbage",
        encode(EvaluateReply(round_num=9, num_examples=1, metrics={"loss": 9.0})),
        *COUNTED,
        raw(
            {
                "kind": "evaluate_reply",
                "fields": {"round_num": 1, "num_examples": 1, "metrics": {"loss": 10**400}},
            },
            safetensors.torch.save({}),
        ),
        reply(round_num=1),
    ],
)
def test_a_hostile_evaluation_is_left_out(answer: bytes) -> None:
    """Mean and worst decile are those of the others."""
    honest = encode(EvaluateReply(round_num=1, num_examples=1, metrics={"loss": 2.0}))
    clients = [ClientId(i) for i in range(NUM_CLIENTS)]
    handlers: dict[ClientId, Handler] = dict.fromkeys(clients, lambda _, state: (honest, state))
    handlers[HOSTILE] = lambda _, state: (answer, state)
    channel = MemoryChannel(handlers, lambda c, _: np.zeros(len(c)), VirtualClock())
    evaluator = ChannelEvaluator(
        channel=channel,
        cohort=lambda _: clients,
        directions={"loss": "min"},
        deadline_s=1.0,
        strategy=STRATEGY,
    )
    found = evaluator.evaluate(GlobalModel(params=Params.of(nn.Linear(2, 1)), round_num=1))
    metrics = found.metrics
    assert (HOSTILE in channel.refused) == (answer not in COUNTED)
    assert metrics["clients/loss_mean"] == 2.0
    assert metrics["clients/loss_worst_decile"] == 2.0


TOP = replace(FEDAVG, transforms=(TopK(fraction=0.5),))
PARTS = {
    "delta/positions": torch.tensor([0, 2], dtype=torch.int32),
    "delta/values": torch.tensor([1.0, 1.0]),
}


def compressed(encoding: str = "top_k", **parts: Tensor) -> bytes:
    own = {f"delta/{name}": value for name, value in parts.items()}
    message = TrainReply(
        round_num=0, lanes={**PARTS, **own}, num_examples=5, metrics={}, encoding=encoding
    )
    return encode(message)


def positions(*numbers: int) -> Tensor:
    return torch.tensor(numbers, dtype=torch.int32)


HOSTILE_PARTS: dict[str, tuple[bytes, str]] = {
    "beyond the model": (compressed(positions=positions(0, 3)), r"do not rise within \[0, 3\)"),
    "before the model": (compressed(positions=positions(-1, 2)), "do not rise within"),
    "twice the same": (compressed(positions=positions(1, 1)), "do not rise within"),
    "falling": (compressed(positions=positions(2, 0)), "do not rise within"),
    "too many": (compressed(positions=positions(0, 1, 2)), r"int32 \[3\], not torch.int32 \[2\]"),
    "none": (compressed(positions=positions()), r"int32 \[0\], not"),
    "a million values": (compressed(values=torch.zeros(1 << 20)), r"\[1048576\], not .* \[2\]"),
    "values of another dtype": (compressed(values=torch.zeros(2).double()), "float64"),
    "a table of values": (compressed(values=torch.zeros(2, 1)), r"\[2, 1\]"),
    "an unknown part": (compressed(extra=torch.zeros(1)), r"extra parts: \['delta/extra'\]"),
    "a whole delta as well": (
        encode(
            TrainReply(
                round_num=0, lanes={**PARTS, **ZERO}, num_examples=5, metrics={}, encoding="top_k"
            )
        ),
        "a whole delta next to its parts",
    ),
    "a whole delta instead": (reply(), "encoding is '', not 'top_k'"),
    "another encoding": (compressed(encoding="top"), "encoding is 'top', not 'top_k'"),
    "not a number": (compressed(values=torch.tensor([1.0, float("nan")])), "not finite"),
    "no text": (raw_reply(encoding=7), "encoding is not text"),
}


def one_compressed_round(answer: bytes, strategy: Strategy = TOP) -> tuple[Params, Participation]:
    """Run a round with the hostile client alone."""
    policy = StragglerPolicy(
        num_wanted=1,
        over_selection=1.0,
        deadline_s=10.0,
        min_reports=1,
        below_minimum=BelowMinimum.SKIP,
        max_retries=0,
    )
    handlers: dict[ClientId, Handler] = {HOSTILE: lambda _, state: (answer, state)}
    channel = MemoryChannel(handlers, lambda c, _: np.zeros(len(c)), VirtualClock())
    collector = PlainCollector(channel=channel, policy=policy, slab_bytes=1 << 20)
    model = nn.Linear(2, 1)
    nn.init.zeros_(model.weight)
    nn.init.zeros_(model.bias)
    plan = RoundPlan(
        draw=lambda *_, **__: [HOSTILE],
        policy=policy,
        collector=collector,
        strategy=strategy,
        seed=Seed(0),
    )
    state, collected, _ = run_round(plan.init(Params.of(model)), plan, attempt=0)
    (row,) = collected.participations
    return state.params, row


@pytest.mark.parametrize("name", list(HOSTILE_PARTS))
def test_hostile_parts_of_a_compressed_update_are_refused(name: str) -> None:
    """Before anything is computed from them. Control: the parts that all of them were made from."""
    answer, reason = HOSTILE_PARTS[name]
    params, row = one_compressed_round(answer)
    assert row.status is Status.FAILED
    assert re.search(reason, row.reason), row.reason
    assert params.vector.tolist() == [0.0, 0.0, 0.0]
    params, row = one_compressed_round(compressed())
    assert row.status is Status.REPORTED
    assert params.vector.tolist() == [1.0, 0.0, 1.0]


def quantized(level: int, scale: float) -> bytes:
    parts = {
        "delta/levels": torch.tensor([level, 1, 0], dtype=torch.int8),
        "delta/scales": torch.tensor([scale, 1.0]),
    }
    return encode(
        TrainReply(round_num=0, lanes=parts, num_examples=5, metrics={}, encoding="quantized")
    )


@pytest.mark.parametrize(
    ("level", "scale", "reason"),
    [
        (-128, 1.0, "a level of the update is below -127"),
        (1, float("nan"), "not finite"),
        (1, float("inf"), "not finite"),
        (127, 1e30, r"exceeds 1e\+20"),
    ],
)
def test_hostile_levels_and_scales_are_refused(level: int, scale: float, reason: str) -> None:
    """Control: the lowest level there is."""
    strategy = replace(FEDAVG, transforms=(Quantized(bits=8),))
    _, row = one_compressed_round(quantized(level, scale), strategy)
    assert row.status is Status.FAILED
    assert re.search(reason, row.reason), row.reason
    _, row = one_compressed_round(quantized(-127, 1.0), strategy)
    assert row.status is Status.REPORTED


def test_a_compressed_update_is_refused_where_none_was_asked_for() -> None:
    _, row = one_compressed_round(compressed(), FEDAVG)
    assert "encoding is 'top_k', not ''" in row.reason
