"""Compression: what is sent restores what the engine uses, in the bytes that were announced."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import fedlearn as fl
from fedlearn.algorithms.collector import RoundRequest
from fedlearn.algorithms.compression import (
    Compressor,
    Target,
    count_delta_bytes,
    find_compressor,
    lanes_to_sum,
    restore_lanes,
    seed_of_round,
    send_updates,
)
from fedlearn.algorithms.lanes import stack_rows
from fedlearn.algorithms.settings import settings_of, transforms_from
from fedlearn.algorithms.transforms import ClippedUpdates, NoisedUpdates
from fedlearn.client.judging import local_noise_ratio
from fedlearn.config.privacy import PrivacySection
from fedlearn.config.secure_aggregation import SecureAggregationSection
from fedlearn.core.codec import OLDEST, decode, encode
from fedlearn.core.messages import ClientId, TrainReply
from fedlearn.core.params import Params
from fedlearn.core.randomness import Seed
from fedlearn.errors import ConfigError
from fedlearn.privacy.bounded_sum import BoundedLane
from fedlearn.secagg.fixed_point import read_levels
from fedlearn.secagg.plan import SecurePlan
from fedlearn.secagg.terms import Terms, encode_contribution
from fedlearn.session.secure import bound_update
from fedlearn.session.session import ClientSession
from fedlearn.simulation.behavior import Behavior, LognormalBandwidth
from fedlearn.training.torch_trainer import TorchTrainer
from tests.parity import shelf

SEED = Seed(3)
SGD = fl.LocalSgd(epochs=1, batch_size=4, learning_rate=0.1)
#: A matrix, a vector, a filter and a number, and three running statistics.
SHAPES = [(6, 5), (7,), (4, 3, 2, 2), ()]
NUM_TRAINED, NUM_STATISTICS = sum(math.prod(shape) for shape in SHAPES), 3
CLIENTS = [ClientId(4), ClientId(9), ClientId(2)]
COMPRESSORS: Sequence[Compressor] = [
    fl.TopK(fraction=0.1),
    fl.TopK(fraction=1.0),
    fl.TopK(fraction=1e-9, error_feedback=True),
    fl.RandomK(fraction=0.1),
    fl.RandomK(fraction=0.3, error_feedback=True),
    fl.SharedRandomK(fraction=0.3, error_feedback=True),
    fl.Quantized(),
    fl.Quantized(bits=4),
    fl.Quantized(bits=4, num_per_scale=4, error_feedback=True),
    fl.PowerSgd(rank=1),
    fl.PowerSgd(rank=2, error_feedback=True),
    fl.PowerSgd(rank=40, error_feedback=True),
]
every_compressor = pytest.mark.parametrize("compressor", COMPRESSORS, ids=repr)


def updates(*, dtype: torch.dtype = torch.float32, seed: int = 0) -> fl.Updates:
    """Three clients' updates with statistics, and a lane of their own."""
    generator = torch.Generator().manual_seed(seed)
    size = NUM_TRAINED + NUM_STATISTICS
    delta = torch.randn(len(CLIENTS), size, generator=generator, dtype=dtype)
    return fl.Updates(
        CLIENTS,
        torch.ones(len(CLIENTS)),
        {"delta": delta, "own": delta[:, :2].clone()},
        based_on=[0] * len(CLIENTS),
        num_trained=NUM_TRAINED,
        shapes=SHAPES,
    )


def row(block: fl.Updates, place: int) -> fl.Updates:
    """The updates of one client."""
    return replace(
        block,
        client_ids=[block.client_ids[place]],
        weights_B=block.weights_B[:1],
        lanes={name: rows[place][None] for name, rows in block.lanes.items()},
        based_on=[0],
    )


@every_compressor
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_a_coordinator_restores_what_the_engine_uses(
    compressor: Compressor, dtype: torch.dtype
) -> None:
    """To the bit, over two rounds, in the announced bytes; in a block as alone."""
    block = updates(dtype=dtype)
    before = list(stack_rows(block.lanes["delta"]).clone())
    kept_B, kept = dict[str, Tensor](), [dict[str, Tensor]() for _ in CLIENTS]
    for round_num in range(2):
        together = send_updates(block, [compressor], kept_B, seed=SEED, round_num=round_num)
        kept_B = dict(together.kept)
        for place, client_id in enumerate(CLIENTS):
            sent = send_updates(
                row(block, place), [compressor], kept[place], seed=SEED, round_num=round_num
            )
            kept[place] = dict(sent.kept)
            reply = TrainReply(
                round_num=round_num,
                lanes=sent.lanes_on_wire(),
                num_examples=1,
                metrics={},
                encoding=compressor.encoding,
            )
            arrived = decode(encode(reply))
            assert isinstance(arrived, TrainReply)
            found = restore_lanes(
                arrived.lanes,
                arrived.encoding,
                [compressor],
                fl.Target(
                    client_ids=[client_id],
                    shapes=SHAPES,
                    dtype=dtype,
                    seed=seed_of_round(SEED, [compressor], round_num=arrived.round_num),
                ),
                num_statistics=NUM_STATISTICS,
            )
            for name, rows in sent.updates.lanes.items():
                assert torch.equal(found[name], rows[0])
            # Products of matrices are rounded differently in a block.
            error = 1e-5 if isinstance(compressor, fl.PowerSgd) else 0.0
            for name, rows in together.updates.lanes.items():
                torch.testing.assert_close(found[name], rows[place], rtol=0.0, atol=error)
            own_bytes = sum(v.nbytes for n, v in reply.lanes.items() if n.startswith("delta/"))
            assert own_bytes == count_delta_bytes(
                [compressor], SHAPES, num_statistics=NUM_STATISTICS, dtype=dtype
            )
        sizes = {name: value.shape[1] for name, value in kept_B.items()}
        assert sizes == compressor.list_kept_sizes(SHAPES)
    assert torch.equal(block.lanes["delta"][0], before[0]), "its argument is unchanged"


@every_compressor
def test_statistics_and_other_lanes_are_sent_whole(compressor: Compressor) -> None:
    block = updates()
    sent = send_updates(block, [compressor], {}, seed=SEED, round_num=0).updates
    delta = sent.lanes["delta"]
    assert isinstance(delta, Tensor)
    statistics = stack_rows(block.lanes["delta"])[:, NUM_TRAINED:]
    assert torch.equal(delta[:, NUM_TRAINED:], statistics)
    assert sent.lanes["own"] is block.lanes["own"]


@every_compressor
def test_settings_describe_a_compressor(compressor: Compressor) -> None:
    """Every client knows it."""
    assert transforms_from(settings_of(SGD, [compressor])) == (compressor,)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16], ids=str)
def test_top_k_takes_the_first_of_equal_numbers(dtype: torch.dtype) -> None:
    """On every device and in every block, whatever torch's or NumPy's own selection does."""
    delta = torch.tensor([[1.0, -1.0, 1.0, 0.5, -1.0], [0.0, 0.0, 0.0, 0.0, -0.0]], dtype=dtype)
    block = fl.Updates(CLIENTS[:2], torch.ones(2), {"delta": delta}, based_on=[0, 0])
    found = fl.TopK(fraction=0.4)(block).lanes["delta"]
    assert stack_rows(found).tolist() == [[1.0, -1.0, 0.0, 0.0, 0.0], [0.0] * 5]


@every_compressor
def test_compressing_and_restoring_at_once_gives_the_same(compressor: Compressor) -> None:
    """With random positions, for example, that are drawn once instead of twice."""
    updates_BQ, _ = updates().delta_parts()
    target = Target(client_ids=CLIENTS, shapes=SHAPES, dtype=updates_BQ.dtype, seed=SEED)
    parts, kept, restored_BQ = compressor.compress_and_restore(updates_BQ, target, {})
    again, kept_again = compressor.compress(updates_BQ, target, {})
    torch.testing.assert_close((parts, kept), (again, kept_again), rtol=0.0, atol=0.0)
    assert torch.equal(restored_BQ, compressor.decompress(parts, target))


def test_top_k_of_everything_is_the_update() -> None:
    """The identity: nothing is lost, and nothing remains to feed back."""
    whole = fl.TopK(fraction=1.0, error_feedback=True)
    sent = send_updates(updates(), [whole], {}, seed=SEED, round_num=0)
    assert torch.equal(sent.updates.lanes["delta"][0], updates().lanes["delta"][0])
    assert not sent.kept["residual"].any()


def test_error_feedback_sends_everything_in_the_end() -> None:
    """What is lost in one round is added in later ones. Without feedback, it is lost."""
    block, total, size = updates(), torch.zeros(3, NUM_TRAINED), NUM_TRAINED
    quarter = fl.TopK(fraction=0.25, error_feedback=True)
    kept, empty = dict[str, Tensor](), replace(block, lanes={"delta": torch.zeros(3, size + 3)})
    for round_num in range(4):
        sent = send_updates(block, [quarter], kept, seed=SEED, round_num=round_num)
        kept, block = dict(sent.kept), empty
        total += stack_rows(sent.updates.lanes["delta"])[:, :size]
    expected = stack_rows(updates().lanes["delta"])[:, :size]
    assert torch.equal(total, expected)
    alone = replace(quarter, error_feedback=False)
    first = send_updates(updates(), [alone], {}, seed=SEED, round_num=0)
    assert not first.kept
    assert not torch.equal(stack_rows(first.updates.lanes["delta"])[:, :size], expected)


# ---- On average right ------------------------------------------------------------------------

UNBIASED: Sequence[Compressor] = [
    fl.RandomK(fraction=0.2),
    fl.SharedRandomK(fraction=0.2),
    fl.Quantized(bits=4),
    fl.Quantized(bits=4, num_per_scale=4),
    fl.Quantized(bits=8),
]


def largest_z(compressor: Compressor, *, num_draws: int = 400) -> float:
    """How many standard errors the mean of many draws is off the update, at the worst number."""
    block = row(updates(), 0)
    exact = stack_rows(block.lanes["delta"])[0, :NUM_TRAINED].double()
    drawn = [
        stack_rows(
            send_updates(block, [compressor], {}, seed=SEED, round_num=each).updates.lanes["delta"]
        )[0, :NUM_TRAINED]
        for each in range(num_draws)
    ]
    rows = torch.stack(drawn).double()
    error = (rows.mean(0) - exact).abs()
    # A number close to a level may be rounded to it each time: allow for one draw that was not.
    one_draw = 2 * rows.std(0).max() / num_draws + 1e-7
    return float((error / (rows.std(0) / num_draws**0.5 + one_draw)).max())


@pytest.mark.parametrize("compressor", UNBIASED, ids=repr)
def test_random_compression_is_right_on_average(compressor: Compressor) -> None:
    """Within five standard errors for each of 62 numbers; the seed is fixed."""
    assert largest_z(compressor) < 5.0


@pytest.mark.parametrize(
    "compressor",
    [fl.RandomK(fraction=0.2, error_feedback=True), fl.TopK(fraction=0.2)],
    ids=repr,
)
def test_a_biased_compression_is_found_out(compressor: Compressor) -> None:
    """The control: these are not right on average."""
    assert largest_z(compressor) > 10.0


# ---- By hand ---------------------------------------------------------------------------------


def test_quantization_equals_the_paper_by_hand() -> None:
    """Section 3.1 of QSGD in float64, one bucket after another, with the same uniform numbers."""
    block = row(updates(dtype=torch.float64), 0)
    exact = stack_rows(block.lanes["delta"])[0, :NUM_TRAINED].numpy()
    sent = send_updates(block, [fl.Quantized(bits=4)], {}, seed=SEED, round_num=0)
    generator = SEED.derive("transform", 0, 0).at(CLIENTS[0]).torch()
    uniform = torch.rand(NUM_TRAINED, generator=generator, dtype=torch.float64).numpy()
    begin, expected, s = 0, [], 7
    for shape in SHAPES:
        for number, draw in zip(
            exact[begin : begin + math.prod(shape)], uniform[begin:], strict=False
        ):
            norm = np.abs(exact[begin : begin + math.prod(shape)]).max()
            ratio = abs(number) / norm * s
            low = math.floor(ratio)
            # Up from zero with the probability of the rest; the draw rounds towards +infinity.
            goes_out = (draw >= 1 - (ratio - low)) if number >= 0 else (draw < ratio - low)
            expected.append(norm * np.sign(number) * (low + goes_out) / s)
        begin += math.prod(shape)
    found = stack_rows(sent.updates.lanes["delta"])[0, :NUM_TRAINED].numpy()
    np.testing.assert_allclose(found, expected, rtol=0, atol=1e-12)


def test_power_sgd_equals_the_paper_by_hand() -> None:
    """Algorithm 1 with QR in place of Gram and Schmidt, over three rounds with warm start."""
    shape, rank = (6, 5), 2
    rng = np.random.default_rng(0)
    seed, kept, right, residual = SEED, dict[str, Tensor](), None, np.zeros(shape)
    compressor = fl.PowerSgd(rank=rank, error_feedback=True)
    for round_num in range(3):
        matrix = rng.normal(size=shape)
        delta = torch.from_numpy(matrix.reshape(1, -1))
        block = fl.Updates(
            CLIENTS[:1], torch.ones(1), {"delta": delta}, based_on=[0], shapes=[shape]
        )
        sent = send_updates(block, [compressor], kept, seed=seed, round_num=round_num)
        kept = dict(sent.kept)
        if right is None:
            generator = seed.derive("transform", 0, 0).at(CLIENTS[0]).torch()
            first = torch.rand(10, generator=generator, dtype=torch.float64).numpy() - 0.5
            right = first.reshape(5, rank)
        corrected = matrix + residual
        left, _ = np.linalg.qr(corrected @ right)
        right = corrected.T @ left
        approximated = left @ right.T
        residual = corrected - approximated
        found = stack_rows(sent.updates.lanes["delta"]).numpy().reshape(shape)
        np.testing.assert_allclose(found, approximated, rtol=0, atol=1e-7)
        # The sign of a column is free in QR, and no matter to the product.
        right = sent.kept["right"].numpy().reshape(5, rank)


def test_power_sgd_sends_whole_what_factors_would_not_shorten() -> None:
    """Vectors, numbers, and matrices that are too small for the rank."""
    block = updates()
    sent = send_updates(block, [fl.PowerSgd(rank=40)], {}, seed=SEED, round_num=0)
    assert torch.equal(stack_rows(sent.updates.lanes["delta"]), stack_rows(block.lanes["delta"]))
    assert sent.parts.keys() == {"whole", "statistics"}


def test_zero_updates_stay_zero() -> None:
    """Nothing divides by their norm."""
    zero = replace(updates(), lanes={"delta": torch.zeros(3, NUM_TRAINED + NUM_STATISTICS)})
    for compressor in COMPRESSORS:
        sent = send_updates(zero, [compressor], {}, seed=SEED, round_num=0)
        assert not stack_rows(sent.updates.lanes["delta"]).any()


def test_a_quantized_update_has_four_or_eight_bits() -> None:
    with pytest.raises(ValueError, match="bits is 5; give 8 or 4"):
        fl.Quantized(bits=5)


# ---- Where it runs -----------------------------------------------------------------------------


@pytest.fixture
def surroundings(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


def answer(algorithm: fl.Strategy) -> bytes:
    """A deployed client's reply."""
    request = RoundRequest(
        round_num=0, attempt=0, params=shelf.initial(), strategy=algorithm, broadcast={}, seed=7
    )
    features, labels = torch.randn(8, 5), torch.zeros(8, dtype=torch.int64)
    trainer = TorchTrainer.of(shelf.make_model, features, labels, device="cpu")
    reply, _ = ClientSession(ClientId(3), trainer).handle(encode(request.message()), b"")
    return reply


def with_transforms(*transforms: Any) -> fl.Strategy:
    return replace(fl.FedAvg(SGD, weight_by_examples=False), transforms=transforms)


def test_a_reply_is_as_short_as_announced() -> None:
    """But for the header and a table of names, which do not grow with the model."""
    whole, short = answer(with_transforms()), answer(with_transforms(fl.TopK(fraction=0.1)))
    size = Params.of(shelf.make_model()).layout.size
    saved = size * 4 - math.ceil(0.1 * size) * 8
    assert len(whole) - len(short) == pytest.approx(saved, abs=150)
    assert whole[2] == OLDEST
    assert short[2] == OLDEST + 1, "an older coordinator would misread it"


def test_virtual_time_counts_the_short_upload() -> None:
    """In the engine as in sessions."""
    request = RoundRequest(
        round_num=0,
        attempt=0,
        params=shelf.initial(),
        strategy=with_transforms(fl.TopK(fraction=0.1)),
        broadcast={},
        seed=7,
    )
    size = request.params.layout.size
    assert request.upload_bytes == math.ceil(0.1 * size) * 8
    whole = replace(request, strategy=with_transforms())
    assert whole.upload_bytes == whole.download_bytes == size * 4


@dataclass(frozen=True, kw_only=True)
class Halves(Compressor):
    """A user's own: half precision."""

    encoding: ClassVar[str] = "halves"

    def describe_parts(self, shapes: Any, dtype: Any) -> dict[str, fl.PartSpec]:
        return {"halves": fl.PartSpec(sum(math.prod(each) for each in shapes), torch.float16)}

    def compress(self, updates_BQ: Tensor, target: Target, kept: Any) -> Any:
        return {"halves": updates_BQ.half()}, {}

    def decompress(self, parts: Any, target: Target) -> Tensor:
        found: Tensor = parts["halves"].to(target.dtype)
        return found


DEVICES = Behavior(
    median_ms_per_example=1.0,
    speed_sigma=0.1,
    bandwidth=LognormalBandwidth(median_mbit_per_s=0.01, sigma=0.1),
    dropout_rate=0.0,
    round_jitter_sigma=0.0,
)


def durations(run: fl.Run) -> list[float]:
    return [record.duration_s for record in run.history]


@pytest.mark.usefixtures("surroundings")
def test_a_compressor_of_ones_own_runs_in_the_engine_and_in_sessions() -> None:
    """With error feedback, to the last bit and virtual second."""
    features = np.random.default_rng(0).normal(size=(60, 5)).astype("float32")
    labels = (features[:, 0] > 0).astype(int)
    data = fl.from_arrays(features, labels, partition=fl.Iid(4), test=(features, labels), seed=0)
    algorithm = with_transforms(Halves(error_feedback=True))
    engines = ({"executor": "sequential", "block_size": 1}, {"transport": "memory"})
    runs = [
        fl.simulate(
            shelf.make_model,
            data,
            algorithm,
            num_rounds=3,
            engine={"num_workers": 1, **engine},
            devices=DEVICES,
        )
        for engine in engines
    ]
    left, right = (run.weights(best=False) for run in runs)
    assert all(torch.equal(left[name], right[name]) for name in left)
    assert durations(runs[0]) == durations(runs[1])
    whole = fl.simulate(
        shelf.make_model,
        data,
        with_transforms(),
        num_rounds=3,
        engine={"num_workers": 1},
        devices=DEVICES,
    )
    assert all(a < b for a, b in zip(durations(runs[0]), durations(whole), strict=True))


# ---- What it composes with ---------------------------------------------------------------------


def test_compression_comes_last() -> None:
    """A transform after it would make numbers that its parts cannot hold."""
    compressor = fl.TopK(fraction=0.5)
    clip = ClippedUpdates(update_clip_norm=1.0)
    assert find_compressor((clip, compressor)) is compressor
    for transforms in ((compressor, clip), (compressor, compressor)):
        with pytest.raises(ConfigError, match="let compression be the last transform"):
            find_compressor(transforms)


@pytest.mark.usefixtures("surroundings")
@pytest.mark.parametrize(
    ("compressor", "reason"),
    [
        (fl.TopK(fraction=0.1), "its own positions, which follow from its data"),
        (fl.RandomK(fraction=0.1), "each client has its own positions; use"),
        (fl.Quantized(), "its own scales, and a secure sum rounds by itself"),
        (fl.PowerSgd(rank=1), "from the sum of the first, in another exchange"),
        (Halves(), "declares no summed_part"),
    ],
    ids=lambda value: value if isinstance(value, str) else type(value).__name__,
)
def test_what_cannot_be_added_under_masks_is_refused(compressor: Compressor, reason: str) -> None:
    """With the reason. The control is the next test."""
    with pytest.raises(ConfigError, match=f"cannot be added under masks: .*{reason}"):
        shelf.simulate(with_transforms(compressor), secure_aggregation=shelf.SECURE)


SHARED = fl.SharedRandomK(fraction=0.2, error_feedback=True)


def sessions_plan(compressor: Compressor | None, *, modulus_bits: int = 32) -> SecurePlan:
    section = SecureAggregationSection(mode="complete", clip_norm=1.0)
    plan = section.plan(
        12,
        min_reports=8,
        by_examples=False,
        further=(),
        compressor=compressor,
        privacy=PrivacySection(),
        has_model=True,
    )
    return replace(plan, modulus_bits=modulus_bits)


def test_a_masked_update_has_as_few_numbers_as_are_sent() -> None:
    """15 of 75, and fewer bits for each where the sum needs no more. Control: all of them."""
    layout = Params.of(shelf.make_model()).layout
    sizes = {
        (compressor, bits): sessions_plan(compressor, modulus_bits=bits).lanes(layout)[0].num_bytes
        for compressor in (None, SHARED)
        for bits in (16, 32)
    }
    assert sizes == {(None, 16): 150, (None, 32): 300, (SHARED, 16): 30, (SHARED, 32): 60}


@pytest.mark.slow
@pytest.mark.usefixtures("surroundings")
def test_the_real_protocol_adds_shared_positions() -> None:
    """The same model as without masks, but for the rounding of the sum."""
    secure = {**shelf.SECURE, "simulate_as": "protocol"}
    memory = {"transport": "memory", "num_workers": 1}
    found = shelf.simulate(with_transforms(SHARED), engine=memory, secure_aggregation=secure)
    expected = shelf.simulate(with_transforms(SHARED))
    torch.testing.assert_close(found, expected, rtol=0.0, atol=1e-5)
    coarse = {**shelf.SECURE, "modulus_bits": 16}
    rounded = shelf.simulate(with_transforms(SHARED), secure_aggregation=coarse)
    error = float((rounded - expected).abs().max())
    assert 1e-5 < error < 2 * 9.0 / 2**11, (
        "two rounds, in levels of 16 bits less four for 12 clients"
    )


@pytest.mark.usefixtures("surroundings")
def test_clients_add_noise_to_what_they_send_alone() -> None:
    """In each of two rounds 15 of 75 numbers change. Control: all do without compression."""
    privacy = {
        "mode": "distributed",
        "population": "compressed",
        "clip_norm": 0.5,
        "noise_multiplier": 1.0,
        "target_delta": 1e-3,
    }
    secure = {"mode": "complete", "simulate_as": "modular_sum"}
    start = start_of_run()
    for transforms, most in (((SHARED,), 30), ((), 75)):
        model = shelf.simulate(
            with_transforms(*transforms), privacy=privacy, secure_aggregation=secure
        )
        num_changed = int((model != start).sum())
        assert most / 2 < num_changed <= most


def start_of_run() -> Tensor:
    """The initial model of :func:`tests.parity.shelf.simulate`, by a run that does not train."""
    still = replace(SGD, learning_rate=1e-30)
    return shelf.simulate(fl.FedAvg(still, weight_by_examples=False))


# ---- The order of clipping and compression -----------------------------------------------------


def long_update(compressor: Compressor) -> tuple[TrainReply, Tensor]:
    """A client's masked contribution after a clip to 1, and what a coordinator would restore."""
    clip = ClippedUpdates(update_clip_norm=1.0)
    block = row(updates(), 0)
    sent = send_updates(block, (clip, compressor), {}, seed=SEED, round_num=0)
    lanes = {name: rows[0] for name, rows in lanes_to_sum(sent, compressor).items()}
    return TrainReply(round_num=0, lanes=lanes, num_examples=1, metrics={}), stack_rows(
        sent.updates.lanes["delta"]
    )[:, :NUM_TRAINED]


def test_a_secure_sum_clips_after_compression() -> None:
    """Compression that is right on average makes an update longer, so a clip before it is no bound.

    The control: a contribution that is not clipped again is refused before it is masked.
    """
    shared = fl.SharedRandomK(fraction=0.1)
    reply, restored = long_update(shared)
    assert float(restored.norm()) > 1.5, "the clip before compression does not hold after it"
    terms = secure_terms(len(reply.lanes["delta"]) - NUM_STATISTICS)
    contribution = bound_update(terms, replace(reply, lanes={"delta": reply.lanes["delta"]}))
    key = bytes(32)
    words = encode_contribution(terms, contribution, rounding_key=key)
    lane = terms.lanes[0]
    levels = read_levels(lane, words[0]).astype(np.float64)
    assert 0.9 * lane.max_level < np.linalg.norm(levels) <= lane.norm
    values = {**contribution.values, "parameters": reply.lanes["delta"][: lane.size].numpy() * 9}
    with pytest.raises(ValueError, match="clip it first"):
        encode_contribution(terms, replace(contribution, values=values), rounding_key=key)


def secure_terms(num_parameters: int) -> Terms:
    """Terms for a delta of that many parameters, and statistics."""
    plan = sessions_plan(None)
    layout = Params.of(Few(num_parameters)).layout
    return plan.terms(layout, run_id=bytes(16), round_num=0, attempt=0, request_hash=bytes(32))


class Few(nn.Module):
    """Some parameters, and three running statistics."""

    def __init__(self, num_parameters: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(num_parameters))
        self.register_buffer("statistics", torch.zeros(NUM_STATISTICS))


@pytest.mark.parametrize(
    "compressor", [fl.SharedRandomK(fraction=0.1), fl.RandomK(fraction=0.1)], ids=repr
)
def test_central_privacy_bounds_what_was_restored(compressor: Compressor) -> None:
    """Whatever compression did. The control: without its clip, one client adds more than that."""
    clip = ClippedUpdates(update_clip_norm=1.0)
    sent = send_updates(row(updates(), 0), (clip, compressor), {}, seed=SEED, round_num=0)
    restored = stack_rows(sent.updates.lanes["delta"])[:, :NUM_TRAINED]
    lane = BoundedLane(1.0, NUM_TRAINED)
    total = torch.zeros(NUM_TRAINED, dtype=torch.float64)
    lane.add(total, restored)
    assert 0.9 * lane.levels < float(total.norm()) <= lane.levels
    assert float((restored.double() / lane.step).norm()) > 1.5 * lane.levels


@pytest.mark.usefixtures("surroundings")
def test_central_privacy_clips_what_compression_leaves() -> None:
    """So the noise covers it: without noise to speak of, the models agree."""
    algorithm = with_transforms(fl.TopK(fraction=0.3, error_feedback=True))
    private = shelf.simulate(algorithm, privacy=shelf.PRIVATE)
    torch.testing.assert_close(private, shelf.simulate(algorithm), rtol=0.0, atol=1e-4)
    adaptive = {**shelf.PRIVATE, "clip_quantile": 0.5, "noise_multiplier": 1.0}
    with pytest.raises(ConfigError, match=r"leave privacy\.clip_quantile out"):
        shelf.simulate(algorithm, privacy=adaptive)


def test_local_noise_comes_before_compression() -> None:
    """What is done to a noised update reveals no more. A client's policy takes it for noise."""
    noise, compressor = NoisedUpdates(clip_norm=1.0, noise_multiplier=2.0), fl.TopK(fraction=0.1)
    assert local_noise_ratio(settings_of(SGD, (noise, compressor))) == 2.0
    assert local_noise_ratio(settings_of(SGD, (compressor, noise))) == 2.0
    assert (
        local_noise_ratio(settings_of(SGD, (noise, ClippedUpdates(update_clip_norm=1.0)))) is None
    )


@pytest.mark.slow
@pytest.mark.usefixtures("surroundings")
@pytest.mark.parametrize("mode", ["late", "local parts"])
def test_rounds_with_stragglers_and_local_parts_compress_alike(mode: str) -> None:
    """Updates of earlier rounds have the random positions of their own round."""
    features = np.random.default_rng(0).normal(size=(60, 5)).astype("float32")
    labels = (features[:, 0] > 0).astype(int)
    data = fl.from_arrays(features, labels, partition=fl.Iid(6), test=(features, labels), seed=0)
    algorithm = with_transforms(fl.RandomK(fraction=0.5, error_feedback=True))
    settings: dict[str, Any] = {"cohort": {"num_wanted": 2}, "devices": DEVICES}
    if mode == "late":
        settings |= {"late_updates": {"mode": "keep"}, "stragglers": {"over_selection": 2.0}}
    else:
        algorithm = fl.KeepLocal(algorithm, ["2.*"])
    engines = (
        {"executor": "sequential", "block_size": 1},
        {"transport": "memory"},
        {"executor": "fused"},
    )
    vectors = list[Tensor]()
    for engine in engines:
        run = fl.simulate(
            shelf.make_model,
            data,
            algorithm,
            num_rounds=4,
            engine={"num_workers": 1, **engine},
            **settings,
        )
        if mode == "late":
            assert any(record.staleness for record in run.history)
        vectors.append(torch.cat([each.flatten() for each in run.weights(best=False).values()]))
    assert torch.equal(vectors[0], vectors[1])
    torch.testing.assert_close(vectors[2], vectors[0], rtol=0.0, atol=1e-5)
