"""A compressed model: clients restore what the coordinator computes with, in fewer bytes."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import fedlearn as fl
from fedlearn.algorithms.collector import RoundRequest
from fedlearn.algorithms.compression import Compressor
from fedlearn.algorithms.download_compression import restore_model
from fedlearn.core.codec import OLDEST, decode, encode
from fedlearn.core.messages import ClientId, Failure, TrainReply, TrainRequest
from fedlearn.core.params import Params
from fedlearn.errors import ConfigError, ProtocolError, SettingsRefused
from fedlearn.rounds.plain import PlainCollector
from fedlearn.rounds.round import RoundPlan, run_round
from fedlearn.session.session import ClientSession
from fedlearn.training.torch_trainer import TorchTrainer
from fedlearn.transport.base import ask_once
from tests.parity import shelf
from tests.parity import test_grpc as grpc
from tests.unit.algorithms.test_compression import DEVICES, Halves, durations

SGD = fl.LocalSgd(epochs=1, batch_size=4, learning_rate=0.1)
QUANTIZED = fl.Quantized(bits=8)


@pytest.fixture
def surroundings(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


def download(compressor: Compressor = QUANTIZED, *, local: fl.LocalUpdate = SGD) -> fl.Strategy:
    return fl.CompressedDownload(fl.FedAvg(local, weight_by_examples=False), compressor)


def with_statistics(dtype: torch.dtype = torch.float32) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(5, 9), nn.BatchNorm1d(9), nn.Linear(9, 3)).to(dtype)


def request_of(
    params: Params, compressor: Compressor | None = QUANTIZED, *, round_num: int = 2
) -> RoundRequest:
    """A round's request, compressed if its strategy says so."""
    plain = fl.FedAvg(SGD)
    strategy = plain if compressor is None else fl.CompressedDownload(plain, compressor)
    return RoundRequest(
        round_num=round_num, attempt=0, params=params, strategy=strategy, broadcast={}, seed=7
    ).compress()


def arrive(request: RoundRequest) -> TrainRequest:
    """The message as a client decodes it."""
    found = decode(encode(request.message()))
    assert isinstance(found, TrainRequest)
    return found


def shrunk(params: Params, compressor: Compressor) -> Tensor:
    return request_of(params, compressor).params.vector


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16], ids=str)
@pytest.mark.parametrize(
    "compressor",
    [QUANTIZED, fl.Quantized(bits=4), fl.Quantized(bits=4, num_per_scale=5)],
    ids=repr,
)
def test_clients_restore_the_coordinators_tensors(
    compressor: Compressor, dtype: torch.dtype
) -> None:
    """To the bit, in the model's own dtypes and order; statistics are those of the model."""
    params = Params.of(with_statistics(dtype))
    request = request_of(params, compressor)
    found, expected = restore_model(arrive(request)).tensors, request.params.to_tensors()
    assert list(found)[: len(params.layout.trainable)] == list(params.layout.by_name)[:6]
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        assert torch.equal(found[name], value)
        assert found[name].dtype == value.dtype
    whole = params.to_tensors()
    for name in ("1.running_mean", "1.running_var", "1.num_batches_tracked"):
        assert torch.equal(found[name], whole[name])
    assert not torch.equal(found["0.weight"], whole["0.weight"])


def test_the_message_is_as_short_as_announced() -> None:
    """But for a header, which does not grow with the model. Control: the whole model."""
    params = Params.of(nn.Linear(100, 100))
    sizes = {None: 10_100 * 4, 8: 10_100 + 8, 4: 5_050 + 8}
    requests = {
        bits: request_of(params, None if bits is None else fl.Quantized(bits=bits))
        for bits in sizes
    }
    assert {bits: each.download_bytes for bits, each in requests.items()} == sizes
    lengths = {bits: len(encode(each.message())) for bits, each in requests.items()}
    for bits in (8, 4):
        saved = lengths[None] - lengths[bits]
        assert saved == pytest.approx(sizes[None] - sizes[bits], abs=500)


def test_a_model_is_drawn_once_a_round() -> None:
    """Attempts get the same one, and rounds others, so that errors do not repeat."""
    params = shelf.initial()
    first = request_of(params)
    assert torch.equal(request_of(params).params.vector, first.params.vector)
    again = replace(request_of(params, None), strategy=first.strategy, attempt=3).compress()
    assert torch.equal(again.params.vector, first.params.vector)
    other = request_of(params, round_num=3)
    assert not torch.equal(other.params.vector, first.params.vector)


def test_a_restored_model_is_right_on_average() -> None:
    """Over many rounds; a single one is off by up to a level."""
    params = Params.of(nn.Linear(4, 3))
    rows = torch.stack(
        [
            request_of(params, fl.Quantized(bits=4), round_num=number).params.vector
            for number in range(400)
        ]
    ).double()
    mean, error = rows.mean(0), rows.std(0) / 20
    assert float(((mean - params.vector).abs() / error.clamp(min=1e-6)).max()) < 5
    largest = (rows[0] - params.vector).abs().max()
    assert float(largest) > 10 * float((mean - params.vector).abs().max())


def test_the_coordinator_keeps_what_it_did_not_send() -> None:
    """Steps far below a level add up: its model moves by the sum of the updates, to the bit.

    The control: a coordinator that takes over what it sent loses its place.
    """
    local = replace(SGD, learning_rate=1e-6, epochs=1)
    start = shelf.start(download())
    models, updates = [start.vector], list[Tensor]()
    strategy = download(fl.Quantized(bits=4), local=local)
    collector = PlainCollector(channel=shelf.sessions(strategy), policy=shelf.POLICY, slab_bytes=0)
    plan = RoundPlan(
        draw=lambda *_, round_num, **__: [ClientId(each) for each in shelf.COHORTS[round_num]],
        policy=shelf.POLICY,
        collector=collector,
        strategy=strategy,
        seed=shelf.SEED,
    )
    state = plan.init(start)
    for _ in shelf.COHORTS:
        state, collected, _ = run_round(state, plan, attempt=0)
        assert collected.aggregate is not None
        updates.append(collected.aggregate.lanes["delta"])
        models.append(state.params.vector)
    for before, after, update in zip(models[:-1], models[1:], updates, strict=True):
        assert torch.equal(after, before + update)
    moved = (models[-1] - models[0]).abs().max()
    assert 0 < float(moved) < 1e-4
    lost = request_of(start, fl.Quantized(bits=4)).params.vector - start.vector
    assert float(lost.abs().max()) > 100 * float(moved)


# ---- What is refused ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    "compressor",
    [fl.TopK(fraction=0.5), fl.RandomK(fraction=0.5), fl.PowerSgd(rank=1)],
    ids=repr,
)
def test_a_model_cannot_be_sent_in_part(compressor: Compressor) -> None:
    with pytest.raises(ConfigError, match="clients need every number of the model; use Quantized"):
        download(compressor)


def test_nothing_is_fed_back_into_a_model() -> None:
    with pytest.raises(ConfigError, match="nothing is lost that could be fed back"):
        download(fl.Quantized(error_feedback=True))


def test_a_client_of_an_older_version_is_not_sent_a_compressed_model() -> None:
    """It could not restore it. Control: a whole one is written for it."""
    message = request_of(shelf.initial()).message()
    with pytest.raises(ValueError, match="cannot restore a model; upgrade it"):
        encode(message, newest=OLDEST)
    assert encode(message)[2] == OLDEST + 1
    assert encode(request_of(shelf.initial(), None).message(), newest=OLDEST)[2] == OLDEST


def answer(message: TrainRequest) -> TrainReply | Failure:
    """A deployed client's reply."""
    features, labels = torch.randn(8, 5), torch.zeros(8, dtype=torch.int64)
    trainer = TorchTrainer.of(shelf.make_model, features, labels, device="cpu")
    reply, _ = ClientSession(ClientId(3), trainer).handle(encode(message), b"")
    found = decode(reply)
    assert isinstance(found, TrainReply | Failure)
    return found


def restore(data: bytes) -> TrainRequest:
    message = decode(data)
    assert isinstance(message, TrainRequest)
    return restore_model(message)


def altered(**changes: Any) -> TrainRequest:
    """A request whose compressed model is not what it should be."""
    message = request_of(shelf.initial()).message()
    assert message.compressed is not None
    parts = {**message.compressed.parts, **changes.pop("parts", {})}
    return replace(message, compressed=replace(message.compressed, parts=parts, **changes))


SHAPES = [(8, 5), (8,), (3, 8), (3,)]
HOSTILE: dict[str, tuple[dict[str, Any], str]] = {
    "too few levels": ({"parts": {"levels": torch.zeros(7, dtype=torch.int8)}}, r"not .* \[75\]"),
    "levels of another dtype": ({"parts": {"levels": torch.zeros(75)}}, "float32"),
    "a part too many": ({"parts": {"more": torch.zeros(1)}}, r"extra parts: \['more'\]"),
    "a level that none has": (
        {"parts": {"levels": torch.full((75,), -128, dtype=torch.int8)}},
        "below -127",
    ),
    "a petabyte": ({"shapes": [(1 << 25, 1 << 25), *SHAPES[1:]]}, "not torch.int8"),
    "too few shapes": ({"shapes": SHAPES[1:]}, "one shape for each dtype"),
    "a compressor for updates": (
        {"settings": {"update": "top_k", "fraction": 0.5, "error_feedback": False}},
        "'top_k' cannot compress a model",
    ),
    "no compressor": ({"settings": {"update": ""}}, "cannot compress a model"),
    "an unknown one": ({"settings": {"update": "transform:Mine"}}, "Mine"),
    "bits that it does not have": (
        {"settings": {"update": "quantized", "bits": 3, "num_per_scale": None}},
        "bits is 3",
    ),
}


@pytest.mark.parametrize("name", list(HOSTILE))
def test_a_client_refuses_what_it_cannot_restore(name: str) -> None:
    """Before memory is taken for it. Control: the request that all of them were made from."""
    changes, reason = HOSTILE[name]
    with pytest.raises((ProtocolError, SettingsRefused), match=reason):
        restore(encode(altered(**changes)))
    reply = answer(altered(**changes))
    assert isinstance(reply, Failure)
    assert isinstance(answer(altered()), TrainReply)


def test_a_trained_tensor_is_not_both_compressed_and_whole() -> None:
    """Otherwise the receiver would have to choose."""
    message = request_of(shelf.initial()).message()
    data = encode(message)
    for old, new, reason in (
        (b'"order": ["0.weight"', b'"order": ["0.wrong!"', None),
        (b'"compressed/levels"', b'"model/0.weight" \n ', "both compressed and whole|parts"),
        (b'"dtypes": ["F32"', b'"dtypes": ["F99"', "unknown dtype 'F99'"),
        (b'"shapes": [[8, 5]', b'"shapes": [[8,-5]', "a shape that no tensor has"),
        (b'"shapes": [[8, 5]', b'"shapes":{ [8, 5]', "malformed"),
    ):
        assert old in data, old
        assert len(old) == len(new)
        if reason is None:
            assert isinstance(decode(data.replace(old, new)), TrainRequest)
            continue
        with pytest.raises(ProtocolError, match=reason):
            decode(data.replace(old, new))


# ---- Where it runs -----------------------------------------------------------------------------


def examples() -> fl.FederatedData:
    features = np.random.default_rng(0).normal(size=(60, 5)).astype("float32")
    labels = (features[:, 0] > 0).astype(int)
    return fl.from_arrays(features, labels, partition=fl.Iid(6), test=(features, labels), seed=0)


def run_on(strategy: fl.Strategy, make_model: Any = shelf.make_model, **settings: Any) -> fl.Run:
    engine = {"num_workers": 1, **settings.pop("engine", {})}
    return fl.simulate(
        make_model,
        examples(),
        strategy,
        num_rounds=4,
        cohort={"num_wanted": 2},
        devices=DEVICES,
        engine=engine,
        **settings,
    )


def flat(run: fl.Run) -> Tensor:
    return torch.cat([each.flatten().double() for each in run.weights(best=False).values()])


ENGINE = {"executor": "sequential", "block_size": 1}
MODES: dict[str, dict[str, Any]] = {
    "synchronous": {},
    "late": {"late_updates": {"mode": "keep"}, "stragglers": {"over_selection": 2.0}},
    "asynchronous": {"asynchronous": {"mode": "buffered", "buffer_size": 2, "concurrency": 4}},
}


@pytest.mark.usefixtures("surroundings")
@pytest.mark.parametrize(
    "mode",
    [pytest.param(name, marks=[pytest.mark.slow] if name != "late" else []) for name in MODES],
)
def test_the_engine_equals_sessions(mode: str) -> None:
    """To the last bit, and in the same virtual time, which is less than with whole models."""
    both = replace(fl.FedAvg(SGD, weight_by_examples=False), transforms=(QUANTIZED,))
    strategy = fl.CompressedDownload(both, QUANTIZED)
    engine = run_on(strategy, engine=ENGINE, **MODES[mode])
    sessions = run_on(strategy, engine={"transport": "memory"}, **MODES[mode])
    assert torch.equal(flat(engine), flat(sessions))
    assert durations(engine) == pytest.approx(durations(sessions), rel=1e-9)
    if mode != "synchronous":
        assert any(record.staleness for record in engine.history)
    whole = run_on(both, engine=ENGINE, **MODES[mode])
    assert sum(durations(engine)) < sum(durations(whole))


@pytest.mark.slow
@pytest.mark.usefixtures("surroundings")
@pytest.mark.parametrize("name", ["statistics", "local parts", "own"])
def test_any_model_and_compressor_may_be_used(name: str) -> None:
    """BatchNorm, parts that stay local, and a compressor of the user's own."""
    strategy, model = download(), shelf.make_model
    if name == "statistics":
        model = with_statistics
    elif name == "local parts":
        strategy = fl.KeepLocal(strategy, ["2.*"])
    else:
        strategy = download(HalfModels())
    engine = run_on(strategy, model, engine=ENGINE)
    sessions = run_on(strategy, model, engine={"transport": "memory"})
    assert torch.equal(flat(engine), flat(sessions))


class HalfModels(Halves):
    """Half precision, which suits models."""

    suits_models = True


@pytest.mark.slow
def test_the_network_carries_fewer_bytes(tmp_path: Path) -> None:
    """To real clients over gRPC. Control: whole models."""
    params, sent = Params.of(grpc.make_model()), dict[str, int]()
    compressors = {"whole": None, "quantized": QUANTIZED}
    with grpc.over_grpc(tmp_path, grpc.make_model) as (channel, gateway):
        for round_num, (name, compressor) in enumerate(compressors.items()):
            request = request_of(params, compressor, round_num=round_num)
            requests = dict.fromkeys(channel.available(), request.message())
            before = gateway.counters.bytes_out
            for arrival in ask_once(channel, requests, deadline_s=grpc.LONG_S):
                assert isinstance(arrival.reply, TrainReply)
            sent[name] = gateway.counters.bytes_out - before
            assert sent[name] == pytest.approx(request.download_bytes * len(requests), rel=0.05)
    assert sent["quantized"] < 0.27 * sent["whole"]


@pytest.mark.usefixtures("surroundings")
def test_a_secure_round_sends_a_compressed_model() -> None:
    """By the real protocol, whose terms name the request; the model is public."""
    memory = {"transport": "memory", "num_workers": 1}
    secure = {**shelf.SECURE, "simulate_as": "protocol"}
    found = shelf.simulate(download(), engine=memory, secure_aggregation=secure)
    torch.testing.assert_close(found, shelf.simulate(download()), rtol=0.0, atol=1e-5)
    whole = shelf.simulate(fl.FedAvg(SGD, weight_by_examples=False))
    assert float((found - whole).abs().max()) > 1e-4
