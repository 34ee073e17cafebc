"""Random reads of a dataset draw the same numbers in the engine, in sessions and on a client."""

import random  # noqa: TID251 - datasets draw from it
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import Dataset, Subset, TensorDataset

import fedlearn as fl
from fedlearn.algorithms.settings import settings_of
from fedlearn.core.features import require_single_input
from fedlearn.core.messages import ClientId
from fedlearn.core.params import Params
from fedlearn.core.randomness import Seed
from fedlearn.errors import DataError
from fedlearn.rounds.records import RoundRecord
from fedlearn.simulation.federated_data import FederatedData
from fedlearn.simulation.pooled import Subpopulation
from fedlearn.simulation.population import DatasetPopulation, PooledPopulation, Population
from fedlearn.simulation.schedule import schedule, training_rows
from fedlearn.training.torch_trainer import TorchTrainer
from fedlearn.training.trainer import TrainContext

pytestmark = pytest.mark.usefixtures("ready_store")

NUM_ROWS, EPOCHS = 60, 3
GENERATOR = torch.Generator()
LOCAL = fl.LocalSgd(epochs=EPOCHS, batch_size=4, learning_rate=0.1)
CLEAN = torch.arange(float(NUM_ROWS * 4)).view(NUM_ROWS, 4) / 100
LABELS = torch.arange(NUM_ROWS) % 3
DRAWS: Mapping[str, Callable[[], float]] = {
    "torch": lambda: float(torch.rand(())),
    "numpy": lambda: float(np.random.normal()),  # noqa: NPY002 - as third-party transforms do
    "python": random.random,
    "nothing": lambda: 0.0,
    "some rows": lambda: 0.0,
    "all": lambda: sum(DRAWS[kind]() for kind in ("torch", "numpy", "python")),
}


class Noisy(Dataset[Any]):
    """A dataset that adds a number to every row, and counts its reads."""

    def __init__(self, kind: str) -> None:
        self.kind, self.num_reads = kind, 0

    def __len__(self) -> int:
        return NUM_ROWS

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        self.num_reads += 1
        draws = self.kind == "some rows" and index % 2
        return CLEAN[index] + DRAWS["torch" if draws else self.kind](), int(LABELS[index])


def make_model() -> nn.Module:
    return nn.Linear(4, 3)


def data_of(dataset: Noisy, **more: Any) -> FederatedData:
    test = TensorDataset(CLEAN, LABELS)
    split: dict[str, Any] = {"partition": fl.Iid(5), "labels": LABELS} | more
    return fl.from_dataset(dataset, **split, test=test, seed=0)


def run_to_end(data: FederatedData, **settings: Any) -> fl.Run:
    usual: dict[str, Any] = {
        "num_rounds": 2,
        "cohort": {"num_wanted": 3},
        "seed": 1,
        "engine": {"num_workers": 1, "executor": "sequential"},
        "evaluation": {"clients": 0},
    }
    return fl.simulate(make_model, data, fl.FedAvg(LOCAL), **(usual | settings))


def weights_of(run: fl.Run) -> Tensor:
    return run.weights(best=False)["weight"]


def positions_and_rows(population: Population, *, round_num: int) -> dict[int, list[Tensor]]:
    """Return the batches that each client's model gets."""
    client_ids = np.arange(population.num_clients)
    seed = Seed(1)
    rows = training_rows(population, client_ids, work=LOCAL, round_num=round_num, seed=seed)
    plan = schedule(
        LOCAL,
        rows,
        client_ids,
        round_num=round_num,
        seed=seed,
        dtype=torch.float32,
        device=torch.device("cpu"),
    )
    features, seen = require_single_input(rows.features), dict[int, list[Tensor]]()
    for client in client_ids.tolist():
        counts = plan.counts_TK[:, client]
        seen[client] = [
            features[plan.rows_TKB[step, client, :count]]
            for step, count in enumerate(counts.tolist())
            if count
        ]
    return seen


class Watched(nn.Module):
    """A model that records its batches in training."""

    def __init__(self, batches: list[Tensor]) -> None:
        super().__init__()
        self.inner, self.batches = make_model(), batches

    def forward(self, features: Tensor) -> Tensor:
        self.batches.append(features.clone())
        outputs: Tensor = self.inner(features)
        return outputs


@pytest.mark.parametrize("kind", DRAWS)
def test_the_engine_reads_what_a_deployed_trainer_reads(kind: str) -> None:
    """Each batch of each epoch, bit for bit, whatever the application drew before."""
    data, deployed = data_of(Noisy(kind)), dict[int, list[Tensor]]()
    assert isinstance(data.population, DatasetPopulation)
    seen = positions_and_rows(data.population, round_num=2)
    for client in seen:
        batches = deployed.setdefault(client, [])
        rows = data.population.partition.rows_of(client).tolist()
        trainer = TorchTrainer.of(partial(Watched, batches), Subset(Noisy(kind), rows))
        torch.manual_seed(client)
        random.seed(client)
        context = TrainContext(
            client_id=ClientId(client),
            round_num=2,
            settings=settings_of(LOCAL),
            seed=Seed(1),
            state={},
        )
        trainer.train(Params.of(Watched([])).to_tensors(), context=context)
        assert len(batches) == len(seen[client]) == 9
        assert all(map(torch.equal, batches, seen[client]))
    epochs = [torch.cat(seen[0][at : at + 3]).sort(0).values for at in (0, 3, 6)]
    assert torch.equal(epochs[0], epochs[1]) == (kind == "nothing")


@pytest.fixture(scope="module")
def expected(tmp_path_factory: pytest.TempPathFactory) -> Tensor:
    """The weights of a run that trains one client after another."""
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(tmp_path_factory.mktemp("runs"))
        return weights_of(run_to_end(data_of(Noisy("all"))))


@pytest.mark.slow
@pytest.mark.parametrize(
    "other",
    [
        {"engine": {"num_workers": 1, "executor": "sequential", "block_size": 1}},
        {"engine": {"num_workers": 1, "executor": "sequential", "transport": "memory"}},
        {"evaluation": {"clients": 5}},
        {"engine": {"num_workers": 1, "executor": "fused"}},
        {"engine": {"num_workers": 1, "executor": "vmap"}},
        pytest.param({"engine": {"num_workers": 2}}, marks=pytest.mark.slow),
    ],
    ids=["one by one", "sessions", "evaluation", "fused", "vmap", "workers"],
)
def test_the_draws_do_not_depend_on_how_a_run_is_computed(
    other: Mapping[str, Any], expected: Tensor
) -> None:
    """Nor on what the script drew before, and its own generators do not change."""
    random.seed(5)
    np.random.seed(5)  # noqa: NPY002 - what a script does
    torch.manual_seed(5)
    before = generators()
    found = weights_of(run_to_end(data_of(Noisy("all")), **other))
    assert generators() == before
    torch.testing.assert_close(found, expected, rtol=0.0, atol=2e-6)


def generators() -> tuple[object, str, bytes]:
    """Return the state of the generators that a script may use."""
    of_numpy = repr(np.random.get_state())  # noqa: NPY002 - as above
    return random.getstate(), of_numpy, torch.get_rng_state().numpy().tobytes()


@pytest.mark.slow
def test_a_dataset_that_draws_nothing_is_read_once_a_round() -> None:
    """A dataset that draws is read once per epoch, but only for clients whose reads are random."""
    reads = {}
    for kind in ("nothing", "some rows", "numpy"):
        marks, dataset = list[int](), Noisy(kind)

        class Mark:
            """Records the number of reads after each round."""

            def after_round(
                self,
                record: RoundRecord,
                model: Params,
                marks: list[int] = marks,
                dataset: Noisy = dataset,
            ) -> None:
                marks.append(dataset.num_reads)

        run_to_end(data_of(dataset), callbacks=[Mark()])
        reads[kind] = (marks[1] - marks[0]) / (3 * NUM_ROWS / 5)
    assert reads["nothing"] == 1.0
    assert {reads[kind] for kind in reads if kind != "nothing"} == {EPOCHS}


@pytest.mark.slow
def test_a_resumed_run_draws_the_same() -> None:
    """Bit-identical to a run that was not interrupted."""
    whole = run_to_end(data_of(Noisy("numpy")), num_rounds=3)

    class Stop:
        """Interrupts the run after its first round."""

        def after_round(self, record: RoundRecord, model: Params) -> None:
            if record.round_num == 0:
                raise KeyboardInterrupt

    settings: dict[str, Any] = {"num_rounds": 3, "store": {"checkpoint_every_s": 0.0}}
    with pytest.raises(KeyboardInterrupt):
        run_to_end(data_of(Noisy("numpy")), callbacks=[Stop()], name="stopped", **settings)
    resumed = run_to_end(data_of(Noisy("numpy")), resume="stopped", **settings)
    assert torch.equal(weights_of(resumed), weights_of(whole))


def test_evaluation_draws_the_same_every_time() -> None:
    """For a client, however it is loaded, and for the test set."""
    noisy = Noisy("torch")
    population = data_of(noisy).population
    together, _ = population.load(np.array([3, 1])).gather()
    alone, _ = population.load(np.array([1])).gather()
    assert torch.equal(require_single_input(together)[12:], require_single_input(alone))
    test_sets = []
    for seed in (1, 2):
        torch.manual_seed(seed)
        made = fl.from_dataset(
            noisy, labels=LABELS, partition=fl.Iid(5), test=Noisy("torch"), seed=0
        )
        test_sets.append(require_single_input(made.test.features))
    assert torch.equal(*test_sets)


def test_wrapped_populations_read_as_their_parts_do() -> None:
    """With the numbers that their clients have in the run."""
    population = data_of(Noisy("torch")).population
    everyone = Subpopulation(population, np.arange(5))
    for mine, theirs in zip(
        positions_and_rows(population, round_num=0).values(),
        positions_and_rows(everyone, round_num=0).values(),
        strict=True,
    ):
        assert all(map(torch.equal, mine, theirs))
    pooled = positions_and_rows(PooledPopulation(population), round_num=0)[0]
    assert sum(map(len, pooled)) == EPOCHS * NUM_ROWS
    assert not torch.equal(
        torch.cat(pooled[:15]).sort(0).values, torch.cat(pooled[15:30]).sort(0).values
    )


class Own(Noisy):
    """Draws from its own generator."""

    def __init__(self, draw: Callable[[], float]) -> None:
        super().__init__("nothing")
        self.draw = draw

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        features, label = super().__getitem__(index)
        return features + self.draw(), label


@pytest.mark.parametrize(
    "draw",
    [
        np.random.default_rng(0).random,
        random.Random(0).random,  # noqa: S311 - as a dataset may do
        np.random.RandomState(0).rand,
        lambda: float(torch.rand((), generator=GENERATOR)),
    ],
    ids=["numpy", "python", "numpy's old", "torch"],
)
def test_a_generator_of_the_datasets_own_is_refused(draw: Callable[[], float]) -> None:
    """Its draws cannot be keyed, so equal runs would differ."""
    with pytest.raises(DataError, match=r"dataset\[0\] differs between two readings.*its own"):
        data_of(Own(draw))
    data_of(Own(lambda: 0.5))  # the control


@pytest.mark.slow
def test_a_trainer_of_the_users_own_is_given_the_same_rows_in_engine_and_sessions() -> None:
    """They are read once per round, with other draws in the next one."""

    def run(transport: str, outer: int) -> list[Tensor]:
        given = list[Tensor]()

        def make_trainer(features: Tensor, labels: Tensor) -> TorchTrainer:
            given.append(features)
            return TorchTrainer.of(make_model, features, labels)

        torch.manual_seed(outer)
        engine = {"num_workers": 1, "transport": transport}
        everyone = {"num_wanted": 5}
        run_to_end(data_of(Noisy("torch")), trainer=make_trainer, engine=engine, cohort=everyone)
        return sorted(given, key=lambda features: float(features.sum()))

    expected = run("engine", 1)
    assert len(expected) == 10
    for found in (run("engine", 2), run("memory", 3)):
        assert all(map(torch.equal, found, expected))
    assert not torch.equal(expected[0], expected[1])
