"""A failing client is data, and the round continues without it; if all fail, the run ends."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

import fedlearn as fl
from fedlearn.core.participations import Status
from fedlearn.errors import EngineError, RoundError
from fedlearn.simulation.behavior import DeviceRound
from fedlearn.simulation.executors.attempts import attempts
from fedlearn.simulation.executors.base import TrainedBlock
from fedlearn.simulation.partition import Partition
from fedlearn.simulation.population import DatasetPopulation
from fedlearn.training.torch_trainer import TorchTrainer
from fedlearn.training.trainer import LocalTrainer

LOCAL = fl.LocalSgd(epochs=1, batch_size=3, learning_rate=0.1)
CULPRIT, SIZES = 2, [6, 9, 7, 6, 3]  # the last batch of CULPRIT has one row
OWNERS = np.repeat(np.arange(len(SIZES)), SIZES)
PARTITION = Partition.of_owners(OWNERS, num_clients=5)


@pytest.fixture(autouse=True)
def surroundings(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


@dataclass(frozen=True)
class Devices:
    """Equally fast devices, some of which fail."""

    failing: tuple[int, ...] = ()

    def durations_s(self, work: DeviceRound) -> NDArray[np.float64]:
        return np.ones(len(work.client_ids))

    def failures(self, work: DeviceRound) -> NDArray[np.bool_]:
        return np.isin(work.client_ids, self.failing)


class Rows(torch.utils.data.Dataset[tuple[Tensor, Tensor]]):
    """A dataset in which one row may be damaged."""

    def __init__(self, damaged: int | None) -> None:
        self.features = torch.randn(len(OWNERS), 4, generator=torch.Generator().manual_seed(0))
        self.damaged = damaged

    def __len__(self) -> int:
        return len(OWNERS)

    def __getitem__(self, row: int) -> tuple[Tensor, Tensor]:
        if row == self.damaged:
            raise OSError("truncated file")
        return self.features[row], torch.tensor(row % 3)


def plain() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3))


def build_normed() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 5), nn.BatchNorm1d(5), nn.Linear(5, 3))


def data(labels: Mapping[int, int] | None = None) -> fl.FederatedData:
    """Build clients with 6, 9, 7, 6 and 3 examples, with the labels of some rows replaced."""
    rows = Rows(None)
    classes = np.arange(len(OWNERS)) % 3
    for row, label in (labels or {}).items():
        classes[row] = label
    return fl.from_arrays(
        rows.features.numpy(),
        classes,
        groups=OWNERS,
        partition=fl.Natural(),
        test=(rows.features.numpy()[:6], np.arange(6) % 3),
        seed=0,
    )


def run(make: Any, clients: fl.FederatedData, failing: Sequence[int] = (), **more: Any) -> fl.Run:
    algorithm = more.pop("algorithm", fl.FedAvg(LOCAL))
    settings: dict[str, Any] = {"num_rounds": 2, "seed": 0, "evaluation": {"clients": 0}}
    devices = Devices(tuple(failing))
    return fl.simulate(make, clients, algorithm, devices=devices, **settings | more)


def failures(found: fl.Run, num: int = 0) -> dict[int, str]:
    rows = found.history[num].participations
    return {row.client_id: row.reason for row in rows if row.status is Status.FAILED}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("make", "executor", "wrong"),
    [
        (plain, "fused", {int(np.flatnonzero(OWNERS == CULPRIT)[3]): 7}),
        (plain, "vmap", {int(np.flatnonzero(OWNERS == CULPRIT)[3]): 7}),
        (build_normed, "vmap", {}),
        (build_normed, "sequential", {}),
    ],
)
def test_one_client_fails_and_the_others_give_what_they_give_without_it(
    make: Any, executor: str, wrong: Mapping[int, int]
) -> None:
    engine = {"executor": executor, "num_workers": 1}
    clients = data(wrong)
    found = run(make, clients, engine=engine)
    without = run(make, clients, (CULPRIT,), engine=engine)
    for num in range(2):
        assert list(failures(found, num)) == [CULPRIT]
        assert "Error" in failures(found, num)[CULPRIT]
        assert "batch of one example" not in failures(found, num)[CULPRIT]
    want = without.weights(best=False)
    # A stacked block keeps the memory layout of the first attempt, so rounding differs.
    atol = 1e-6 if make is build_normed and executor == "vmap" else 0.0
    for name, value in found.weights(best=False).items():
        torch.testing.assert_close(value, want[name], rtol=0.0, atol=atol)


@pytest.mark.slow
@pytest.mark.parametrize(
    "settings",
    [
        {
            "asynchronous": {"mode": "buffered", "buffer_size": 3, "concurrency": 4},
            "staleness": {"max_staleness": 3},
        },
        {"late_updates": {"mode": "keep"}, "staleness": {"max_staleness": 2}},
        {"engine": {"transport": "memory"}},
    ],
)
def test_every_kind_of_round_goes_on(settings: dict[str, Any]) -> None:
    found = run(build_normed, data(), **settings)
    told = failures(found) | failures(found, 1)
    assert "ValueError: Expected more than 1 value per channel" in told.pop(CULPRIT)
    assert not told
    assert all(each.participations.num(Status.REPORTED) for each in found.history)


def test_a_row_that_cannot_be_read_is_named() -> None:
    damaged = int(np.flatnonzero(OWNERS == 0)[2])
    clients = fl.FederatedData(
        population=DatasetPopulation(dataset=Rows(damaged), partition=PARTITION, num_classes=3),
        test=data().test,
    )
    found = run(plain, clients)
    assert list(failures(found)) == [0]
    assert f"row {damaged} of the dataset cannot be read: OSError: truncated" in failures(found)[0]


class Failing:
    """A trainer that trains as ``TorchTrainer`` does, or fails."""

    def __init__(self, features: Tensor, labels: Tensor, *, fails: bool) -> None:
        self.inner = TorchTrainer.of(plain, features, labels)
        self.fails, self.honors = fails, self.inner.honors

    def train(self, tensors: Mapping[str, Tensor], *, context: Any) -> Any:
        if self.fails:
            raise ZeroDivisionError("no battery")
        return self.inner.train(tensors, context=context)

    def evaluate(self, tensors: Mapping[str, Tensor], *, control: Any) -> Any:
        return self.inner.evaluate(tensors, control=control)


@pytest.mark.parametrize("everyone", [False, True])
def test_a_trainer_that_raises_names_its_place_and_only_all_of_them_end_the_run(
    *, everyone: bool
) -> None:
    def make_trainer(features: Tensor, labels: Tensor) -> LocalTrainer:
        return Failing(features, labels, fails=everyone or len(labels) == SIZES[CULPRIT])

    if everyone:
        with pytest.raises(
            EngineError, match=r"round 1: no client can be trained; client \d: .*no b"
        ):
            run(plain, data(), trainer=make_trainer)
        return
    found = run(plain, data(), trainer=make_trainer)
    assert list(failures(found)) == [CULPRIT]
    assert "test_failing_clients.py:" in failures(found)[CULPRIT]
    assert "ZeroDivisionError: no battery" in failures(found)[CULPRIT]


def test_a_mistake_of_all_ends_the_run_at_once_with_its_place() -> None:
    def loss(outputs: Tensor, labels: Tensor) -> Tensor:
        raise KeyError("weights")

    for executor in ("auto", "sequential"):
        with pytest.raises(EngineError, match=r"KeyError: 'weights'") as told:
            run(plain, data(), objective=fl.CustomLoss(loss), engine={"executor": executor})
        assert isinstance(told.value.__cause__, KeyError)


@pytest.mark.slow
def test_too_few_reports_end_the_run_by_the_cohorts_own_rule() -> None:
    with pytest.raises(RoundError, match="5"):
        run(build_normed, data(), stragglers={"min_reports": 5, "below_minimum": "fail"})


def test_a_client_that_cannot_be_evaluated_is_left_out() -> None:
    clients = data({int(np.flatnonzero(OWNERS == CULPRIT)[3]): 7})
    found = run(plain, clients, evaluation={"clients": 5})
    others = run(plain, data(), (CULPRIT,), evaluation={"clients": 5})
    spread = "clients/loss_mean"
    assert np.isfinite(found.history[-1].metrics[spread])
    assert found.history[-1].metrics[spread] != others.history[-1].metrics[spread]


@pytest.mark.parametrize(
    ("failing", "most", "want"),
    [
        ((), 4, [[0, 1, 2, 3]]),
        ((1,), 4, [[0, 2, 3]]),
        ((0, 1, 2, 3), 4, []),
        ((2,), 1, [[0], [1], [3]]),
    ],
)
def test_a_block_trains_again_without_those_that_fail(
    failing: Sequence[int], most: int, want: Sequence[Sequence[int]]
) -> None:
    """``most`` is the number of clients for which there is enough memory."""

    def train(some: NDArray[np.int64]) -> TrainedBlock:
        if len(some) > most or np.isin(some, failing).any():
            raise RuntimeError(f"of {some.tolist()}")
        values = torch.from_numpy(some).double()[:, None]
        return TrainedBlock(
            deltas_KP=values, lanes={}, losses_K=some / 1.0, num_examples_K=some, client_state={}
        )

    errors = dict[int, BaseException]()
    found = [(places.tolist(), each) for places, each in attempts(train, np.arange(4), errors)]
    assert [places for places, _ in found] == want
    assert {place: str(error) for place, error in errors.items()} == {
        c: f"of [{c}]" for c in failing
    }


@pytest.mark.slow
def test_clients_with_a_last_batch_of_one_are_named_before_the_first_round(
    capsys: pytest.CaptureFixture[str],
) -> None:
    told = "1 of 5 clients have a last batch of one example, which layer 1 (BatchNorm1d) may fail"
    for make, drop_last, is_told in (
        (build_normed, False, True),
        (build_normed, True, False),
        (plain, False, False),
    ):
        local = fl.LocalSgd(epochs=1, batch_size=3, learning_rate=0.1, drop_last=drop_last)
        found = run(make, data(), algorithm=fl.FedAvg(local), num_rounds=1)
        assert (told in capsys.readouterr().out) is is_told
        assert (CULPRIT in failures(found)) is is_told
