"""Features that look different at each client: what is shifted, how, and the same everywhere."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from scipy import ndimage
from torch import nn
from torch.utils.data import TensorDataset

import fedlearn as fl
from fedlearn.config import load
from fedlearn.core.features import require_single_input
from fedlearn.errors import ConfigError, DataError
from fedlearn.simulation.feature_shift import FeatureShift
from fedlearn.simulation.fingerprint import fingerprint_of
from fedlearn.simulation.population import Population, unread_rows

RNG = np.random.default_rng(0)
IMAGES = RNG.random((48, 1, 6, 6)).astype("float32")
LABELS = RNG.integers(0, 2, 48)
OWNERS = np.arange(48) % 4
TURNS = fl.RotationShift((0, 90, 180, 270))
SHIFTS: list[FeatureShift] = [
    TURNS,
    fl.RotationShift((10, -25.5)),
    fl.NoiseShift(std=0.3),
    fl.AffineShift(scale=0.2, offset=0.5),
]
EACH_SHIFT = pytest.mark.parametrize("shift", SHIFTS, ids=lambda shift: type(shift).__name__)


@pytest.fixture(autouse=True)
def _elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def divide(
    features: Any = IMAGES, labels: Any = LABELS, *, partition: Any = None, **more: Any
) -> fl.FederatedData:
    given: dict[str, Any] = {"partition": partition}
    if partition is None:
        given = {"partition": fl.Natural(), "groups": OWNERS[: len(features)]}
    test = (features[:8], labels[:8])
    return fl.from_arrays(features, labels, test=test, seed=0, **given, **more)


def from_dataset() -> fl.FederatedData:
    """The same clients, read from a dataset."""
    pairs = TensorDataset(torch.from_numpy(IMAGES), torch.from_numpy(LABELS))
    test = TensorDataset(torch.from_numpy(IMAGES[:8]), torch.from_numpy(LABELS[:8]))
    return fl.from_dataset(pairs, groups=OWNERS, partition=fl.Natural(), test=test, seed=0)


def read_test(data: fl.FederatedData) -> NDArray[Any]:
    return require_single_input(data.stored_test.features).numpy()


def read(population: Population | None, client_id: int) -> NDArray[Any]:
    assert population is not None
    features, _ = population.load(np.asarray([client_id])).gather()
    return require_single_input(features).numpy()


@EACH_SHIFT
def test_memory_datasets_and_batches_hold_the_same_shifted_examples(shift: FeatureShift) -> None:
    """Bit for bit, alone and in blocks, and in a batch that a dataset reads."""
    first, other = (each.with_feature_shift(shift, seed=3) for each in (divide(), from_dataset()))
    everyone = np.arange(4)
    block, _ = other.population.load(everyone[::-1]).gather()
    alone = [read(first.population, client_id) for client_id in range(4)]
    assert np.array_equal(require_single_input(block).numpy(), np.concatenate(alone[::-1]))
    assert not np.array_equal(np.concatenate(alone), IMAGES[np.argsort(OWNERS, kind="stable")])
    unread = unread_rows(other.population, np.asarray([2]))
    assert unread is not None
    batch, labels = unread.batch(np.asarray([5, 1]), key=0)
    assert np.array_equal(require_single_input(batch).numpy(), alone[2][[5, 1]])
    assert labels.tolist() == LABELS[OWNERS == 2][[5, 1]].tolist()


@EACH_SHIFT
@pytest.mark.parametrize("dtype", ["uint8", "uint16", "int16", "float16", "float64"])
def test_dtypes_are_kept(shift: FeatureShift, dtype: str) -> None:
    """Integers are rounded, and do not wrap around."""
    bright = (250 + 5 * IMAGES).astype(dtype)
    data = divide(bright).with_feature_shift(shift, seed=0)
    shifted = read(data.population, 3)
    assert shifted.dtype == dtype
    if isinstance(shift, fl.NoiseShift):
        assert np.abs(shifted.astype(float) - bright[OWNERS == 3]).max() < 3


def test_right_angles_turn_images_exactly_and_each_as_often() -> None:
    """Four clients have the four angles, as numpy turns them."""
    data = divide().with_feature_shift(TURNS, seed=0)
    assert data.shift is not None
    found = []
    for client_id in range(4):
        own = IMAGES[client_id == OWNERS]
        turns = [
            count
            for count in range(4)
            if np.array_equal(read(data.population, client_id), np.rot90(own, count, (2, 3)))
        ]
        assert data.shift.describe(client_id) == f"rotated by {90 * turns[0]}°"
        found += turns
    assert sorted(found) == [0, 1, 2, 3]


@pytest.mark.parametrize("angle", [30.0, -77.0, 200.0])
def test_other_angles_interpolate_as_scipy_does(angle: float) -> None:
    """Also where height and width differ."""
    wide = RNG.random((12, 2, 20, 31)).astype("float32")
    data = divide(wide, LABELS[:12]).with_feature_shift(fl.RotationShift((angle,)), seed=0)
    expected = ndimage.rotate(
        wide[OWNERS[:12] == 1], angle, axes=(3, 2), reshape=False, order=1, mode="constant"
    )
    inner = np.s_[:, :, 8:12, 12:19]
    assert np.abs(read(data.population, 1)[inner] - expected[inner]).max() < 1e-4


def test_images_in_flat_rows_are_rotated_by_their_shape() -> None:
    """Also those of several channels."""
    for flat, shape in ((IMAGES.reshape(48, 36), (6, 6)), (IMAGES.reshape(48, 36), (3, 6))):
        turned = fl.RotationShift((180,), image_shape=shape)
        data = divide(flat).with_feature_shift(turned, seed=0)
        channels = flat[OWNERS == 0].reshape(12, -1, *shape)
        expected = np.rot90(channels, 2, (2, 3)).reshape(12, 36)
        assert np.array_equal(read(data.population, 0), expected)


def test_noise_grows_with_the_number_of_the_client() -> None:
    """None at the first; the standard deviation of NIID-Bench at the others."""
    flat = np.zeros((400, 200), "float32")
    data = fl.from_arrays(
        flat, np.zeros(400, int), partition=fl.Iid(5), test=(flat[:1], [0]), seed=0
    )
    noisy = data.with_feature_shift(fl.NoiseShift(std=0.4), seed=0)
    found = [read(noisy.population, client_id) for client_id in range(5)]
    assert [round(float(each.std()), 2) for each in found] == [0.0, 0.1, 0.2, 0.3, 0.4]
    assert max(abs(float(each.mean())) for each in found) < 0.01
    # Each example has noise of its own.
    assert len(np.unique(found[4][:, 0])) == 80


def test_affine_shifts_are_the_same_for_all_examples_of_a_client_and_differ_by_column() -> None:
    """Offsets are in units of each column's spread in the test set."""
    table = RNG.normal(size=(48, 3)) * [1.0, 1000.0, 0.0]
    data = divide(table).with_feature_shift(fl.AffineShift(scale=0.3, offset=0.5), seed=0)
    fitted = []
    for client_id in range(4):
        own, shifted = table[client_id == OWNERS], read(data.population, client_id)
        assert not shifted[:, 2].any()  # a constant column has no spread
        for column, spread in ((0, table[:8, 0].std()), (1, table[:8, 1].std())):
            slope, offset = np.polyfit(own[:, column], shifted[:, column], 1)
            assert np.allclose(slope * own[:, column] + offset, shifted[:, column])
            fitted.append((np.log(slope) / 0.3, offset / spread / 0.5))
    assert len({round(value, 6) for pair in fitted for value in pair}) == 16
    assert 0.3 < np.std(fitted) < 2.0
    still = divide(table).with_feature_shift(fl.AffineShift(scale=0.0, offset=0.0), seed=0)
    assert np.array_equal(read(still.population, 1), table[OWNERS == 1])


@EACH_SHIFT
def test_own_tests_are_shifted_and_the_central_test_is_not(shift: FeatureShift) -> None:
    """Tests that are given before or after are the same; noise differs from the training rows'."""
    pairs = [(IMAGES[client_id == OWNERS], LABELS[client_id == OWNERS]) for client_id in range(4)]
    before = divide().with_client_tests(pairs).with_feature_shift(shift, seed=0)
    after = divide().with_feature_shift(shift, seed=0).with_client_tests(pairs)
    for client_id in range(4):
        tests = read(before.client_tests, client_id)
        assert np.array_equal(tests, read(after.client_tests, client_id))
        is_noise = isinstance(shift, fl.NoiseShift) and client_id > 0
        assert is_noise != np.array_equal(tests, read(before.population, client_id))
    assert np.array_equal(read_test(before), read_test(divide()))
    grouped = divide(test_groups=OWNERS[:8]).with_feature_shift(shift, seed=0)
    assert np.array_equal(read_test(grouped), read_test(divide()))
    assert not np.array_equal(
        np.concatenate([read(grouped.client_tests, client_id) for client_id in range(4)]),
        IMAGES[:8][np.argsort(OWNERS[:8], kind="stable")],
    )


def make_model() -> nn.Module:
    return nn.Sequential(nn.Flatten(), nn.Linear(36, 2))


@pytest.mark.parametrize(
    "shift",
    [SHIFTS[1], pytest.param(SHIFTS[2], marks=pytest.mark.slow)],
    ids=["rotation", "noise"],
)
def test_engine_sessions_and_workers_train_on_the_same(shift: FeatureShift) -> None:
    """Also with examples held out by each client, and from a dataset; unshifted, it differs."""

    def train(data: fl.FederatedData, **engine: Any) -> dict[str, float]:
        local = fl.LocalSgd(epochs=1, batch_size=4, learning_rate=0.5)
        run = fl.simulate(
            make_model,
            data,
            fl.FedAvg(local),
            num_rounds=2,
            cohort={"num_wanted": 4},
            evaluation={"client_test_fraction": 0.3},
            engine=engine,
        )
        return dict(run.history[-1].metrics)

    shifted = divide().with_feature_shift(shift, seed=0)
    expected = train(shifted)
    assert train(shifted, transport="memory") == pytest.approx(expected, abs=1e-5)
    assert train(shifted, num_workers=2) == pytest.approx(expected, abs=1e-5)
    read_later = from_dataset().with_feature_shift(shift, seed=0)
    assert train(read_later) == pytest.approx(expected, abs=1e-5)
    assert train(divide())["clients/loss_mean"] != pytest.approx(expected["clients/loss_mean"])


@EACH_SHIFT
def test_virtual_clients_shift_what_they_draw(shift: FeatureShift) -> None:
    """A million clients cost nothing until they are loaded, and cannot hold examples out."""
    virtual = fl.Bootstrap(num_clients=1_000_000, examples_per_client=3)
    whole = divide(partition=virtual)
    data = whole.with_feature_shift(shift, seed=0)
    for client_id in (999_999, 1):
        own = read(data.population, client_id)
        assert np.array_equal(own, read(data.population, client_id))
    assert fingerprint_of(data.population).users == fingerprint_of(whole.population).users
    with pytest.raises(DataError, match="draw their examples from common ones"):
        fl.simulate(
            make_model,
            data,
            fl.FedAvg(fl.LocalSgd(epochs=1, batch_size=4, learning_rate=0.5)),
            evaluation={"client_test_fraction": 0.5},
        )


def test_a_configuration_shifts_its_clients() -> None:
    """By the seed of the run; without the table, nothing is shifted."""
    rotation = ['data.shift={kind="rotation", angles=[0, 90], image_shape=[8, 8]}']
    one = load(None, overrides=rotation).data.load_clients(seed=0, data_dir=Path())
    other = load(None, overrides=rotation).data.load_clients(seed=1, data_dir=Path())
    assert one.shift is not None
    assert other.shift is not None
    texts = [[data.describe(each) for each in range(50)] for data in (one.shift, other.shift)]
    assert texts[0] != texts[1]
    assert [text.count("rotated by 90°") for text in texts] == [25, 25]
    assert load(None, overrides=()).data.load_clients(seed=0, data_dir=Path()).shift is None
    for text, message in (
        ("std=0.0", "std: is 0.0; give a number > 0"),
        ("angles=[]", r"angles: is \[\]; give an array that is not empty, each of it a number"),
        ("image_shape=[8]", "image_shape: is missing; give an array of 2, each of it an integer"),
    ):
        kind = "noise" if text.startswith("std") else "rotation"
        with pytest.raises(ConfigError, match=message):
            load(None, overrides=[f"data.shift.kind={kind}", f"data.shift.{text}"])


def test_shifts_that_cannot_be_are_refused() -> None:
    """With the reason, before anything is trained."""
    flat, words = IMAGES.reshape(48, 36), RNG.integers(0, 9, (48, 36))
    dense = np.zeros((48, 6, 6), int)
    pair = (flat, flat)
    refused: list[tuple[fl.FederatedData, FeatureShift, str]] = [
        (divide(flat), TURNS, "without height and width; give image_shape"),
        (divide(flat), fl.RotationShift((0,), image_shape=(5, 5)), "25 values, but an example"),
        (divide(labels=dense), TURNS, r"labels of shape \(6, 6\) per example"),
        (divide(words), fl.NoiseShift(std=1.0), "int64, which number words"),
        (divide(words), fl.AffineShift(scale=1.0, offset=0.0), "int64, which number words"),
        (divide(flat[:, 0]), fl.AffineShift(scale=1.0, offset=0.0), "have no columns"),
        (divide().with_feature_shift(TURNS, seed=0), TURNS, "shifted already"),
    ]
    several = fl.from_arrays(
        pair, LABELS, partition=fl.Iid(3), test=((flat[:3], flat[:3]), LABELS[:3]), seed=0
    )
    refused += [(several, shift, "examples of one input") for shift in SHIFTS]
    for data, shift, message in refused:
        with pytest.raises(DataError, match=message):
            data.with_feature_shift(shift, seed=0)
    with pytest.raises(ValueError, match="angles is "):
        fl.RotationShift((0, float("nan")))
    with pytest.raises(ValueError, match="image_shape is "):
        fl.RotationShift((0,), image_shape=(0, 4))
    with pytest.raises(ValueError, match="std is 0"):
        fl.NoiseShift(std=0.0)


def test_privacy_does_not_look_for_shifted_examples_in_its_ledgers() -> None:
    """Their values are others, so the people would not be found; a named ledger is taken."""
    data = divide().with_feature_shift(SHIFTS[3], seed=0)
    local = fl.LocalSgd(epochs=1, batch_size=4, learning_rate=0.5)
    algorithm = fl.FedAvg(local, weight_by_examples=False)
    privacy: dict[str, Any] = {"mode": "central", "noise_multiplier": 2.0, "clip_norm": 1.0}
    privacy["target_delta"] = 0.01
    settings: dict[str, Any] = {"num_rounds": 1, "cohort": {"num_wanted": 2}}
    with pytest.raises(ConfigError, match=r"are shifted, .* name the population"):
        fl.simulate(make_model, data, algorithm, privacy=privacy, **settings)
    named = privacy | {"population": "ward 5"}
    assert fl.simulate(make_model, data, algorithm, privacy=named, **settings).history
