"""A user's sampler and callbacks in a simulation from Python, with one worker and two."""

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import fedlearn as fl
from fedlearn.core.messages import ClientId
from fedlearn.core.randomness import Seed
from fedlearn.errors import ConfigError
from fedlearn.rounds.records import RunStatus

NUM_CLIENTS = 12
EVERYBODY = [ClientId(each) for each in range(NUM_CLIENTS)]
GUIDE = Path(__file__).parents[2] / "docs" / "how-to" / "own-sampler-and-callbacks.md"
ALGORITHM = fl.FedAvg(fl.LocalSgd(epochs=1, batch_size=8, learning_rate=0.1))


def make_model() -> nn.Module:
    return nn.Sequential(nn.Linear(6, 8), nn.Dropout(0.3), nn.Tanh(), nn.Linear(8, 2))


@pytest.fixture(autouse=True)
def _runs_in_a_fresh_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


def data() -> fl.FederatedData:
    rng = np.random.default_rng(0)
    labels = rng.integers(0, 2, 600)
    features = rng.normal(size=(600, 6)) + 2.0 * labels[:, None]
    partition = fl.Iid(num_clients=NUM_CLIENTS)
    return fl.from_arrays(features, labels, partition=partition, test_fraction=0.25, seed=0)


def run(**settings: Any) -> fl.Run:  # Any: arguments, keys and tables
    everything: dict[str, Any] = {
        "num_rounds": 6,
        "cohort": {"num_wanted": 4},
        "store": {"checkpoint_every_s": 0.0},
        "engine": {"num_workers": 1, "executor": "sequential"},
        **settings,
    }
    return fl.simulate(make_model, data(), ALGORITHM, **everything)


Draw = Callable[[Sequence[ClientId], int], Sequence[ClientId]]


@dataclass(frozen=True)
class Drawn:
    """A sampler that draws with a function."""

    draw: Draw

    def sample(
        self,
        available: Sequence[ClientId],
        *,
        cohort_size: int,
        round_num: int,
        attempt: int,
        seed: Seed,
    ) -> tuple[ClientId, ...]:
        return tuple(self.draw(available, round_num))


def in_turn(available: Sequence[ClientId], round_num: int) -> Sequence[ClientId]:
    return [available[(round_num + step) % NUM_CLIENTS] for step in range(3)]


@dataclass
class Looking:
    """A callback that keeps its arguments, and may end the run after a round."""

    last_round: int | None = None
    rounds: list[int] = field(default_factory=list)
    models: list[nn.Module] = field(default_factory=list)

    def after_round(self, record: fl.RoundRecord, model: nn.Module) -> bool:
        self.rounds.append(record.round_num)
        self.models.append(model)
        return record.round_num == self.last_round


def same(left: dict[str, Tensor], right: dict[str, Tensor]) -> bool:
    return all(torch.equal(left[name], right[name]) for name in left)


@pytest.mark.slow
@pytest.mark.parametrize("num_workers", [1, 2])
def test_a_sampler_of_the_users_says_who_is_asked(num_workers: int) -> None:
    """Any number of clients, in any process. The control: without it there are four, at random."""
    mine = run(sampler=Drawn(in_turn), engine={"num_workers": num_workers})
    asked = [sorted(record.participations.client_ids.tolist()) for record in mine.history]
    assert asked == [sorted(in_turn(EVERYBODY, each)) for each in range(6)]
    assert "in_turn" in str(mine.record.config["python"])
    assert [len(record.participations) for record in run().history] == [4] * 6


@pytest.mark.slow
def test_a_sampler_that_draws_at_random_gives_two_workers_one_cohort() -> None:
    """It is called in one process only; two different cohorts would deadlock the processes."""

    def drawn(available: Sequence[ClientId], _: int) -> Sequence[ClientId]:
        rng = np.random.default_rng()  # seeded by the system, so each process would draw its own
        return [available[each] for each in rng.choice(NUM_CLIENTS, rng.integers(1, 8), False)]

    finished = run(sampler=Drawn(drawn), engine={"num_workers": 2}, num_rounds=12)
    assert finished.record.status is RunStatus.DONE
    for record in finished.history:
        assert record.participations.num_examples.tolist()
        assert record.outcome.value == "aggregated"


@pytest.mark.parametrize(
    ("drawn", "complaint"),
    [
        ([], "the cohort is empty"),
        ([1, 1, 2], "client 1 is in the cohort twice"),
        ([1, NUM_CLIENTS], f"client {NUM_CLIENTS} is not available"),
        ([0.5], r"it returned \(0.5,\)"),
    ],
)
def test_a_cohort_that_cannot_be_asked_is_refused(drawn: list[Any], complaint: str) -> None:
    """Before any client trains, with the sampler's name and the round."""
    with pytest.raises(ConfigError, match=f"sampler: Drawn, round 1: {complaint}"):
        run(sampler=Drawn(lambda *_: drawn))


def test_numpy_integers_are_client_ids() -> None:
    """As ``rng.choice`` returns them."""
    finished = run(sampler=Drawn(lambda *_: list(np.arange(5))))
    assert len(finished.history[0].participations) == 5


@pytest.mark.parametrize(
    ("settings", "complaint"),
    [
        ({"cohort": {"sampling": "uniform"}}, "cohort.sampling is 'uniform', but sampler="),
        ({"centralized": True}, "centralized asks no clients"),
        (
            {
                "cohort": {"num_wanted": 10},
                "secure_aggregation": {"mode": "complete", "simulate_as": "modular_sum"},
            },
            "secure_aggregation.mode is 'complete'",
        ),
    ],
)
def test_what_a_sampler_would_replace_or_break_is_refused(
    settings: dict[str, Any], complaint: str
) -> None:
    """The control: without the sampler the same settings run."""
    with pytest.raises(ConfigError, match=complaint):
        run(sampler=Drawn(in_turn), **settings)
    assert run(**settings, num_rounds=1).record.status is RunStatus.DONE


@pytest.mark.parametrize("method", ["sampler", "callbacks"])
@pytest.mark.parametrize("what", [lambda *_: (ClientId(0),), Drawn])
def test_what_cannot_be_called_is_refused_before_anybody_trains(method: str, what: object) -> None:
    """A function or a class in place of an object."""
    name = {"sampler": "sample", "callbacks": "after_round"}[method]
    given = what if method == "sampler" else [what]
    with pytest.raises(ConfigError, match=f"{method}.*not an object with a method {name}"):
        run(**{method: given})
    assert not Path("runs").exists()


@pytest.mark.slow
@pytest.mark.parametrize("num_workers", [1, 2])
def test_callbacks_see_each_round_and_its_model(num_workers: int) -> None:
    """Once for any number of workers. Each gets its own copy; the last is the run's model."""
    first, second = Looking(), Looking()
    finished = run(callbacks=[first, second], engine={"num_workers": num_workers})
    assert first.rounds == second.rounds == list(range(6))
    assert not first.models[0].training
    last = {name: value.detach() for name, value in first.models[-1].state_dict().items()}
    assert same(last, finished.weights(best=False))
    assert not same(last, dict(first.models[-2].state_dict()))


@pytest.mark.slow
def test_what_a_callback_does_to_the_model_changes_nothing_in_the_run() -> None:
    """A run with callbacks has the same bits as one without."""

    class Spoiling:
        def after_round(self, record: fl.RoundRecord, model: nn.Module) -> None:
            for value in model.parameters():
                value.data.zero_()

    spoilt, plain = run(callbacks=[Spoiling()]), run()
    assert same(spoilt.weights(best=False), plain.weights(best=False))


@pytest.mark.slow
@pytest.mark.parametrize("num_workers", [1, 2])
def test_a_callback_may_end_the_run(num_workers: int) -> None:
    """After that round, as done and committed; other callbacks are called for that round too."""
    ending, other = Looking(last_round=2), Looking()
    finished = run(callbacks=[ending, other], engine={"num_workers": num_workers})
    assert ending.rounds == other.rounds == [0, 1, 2]
    assert [record.round_num for record in finished.history] == [0, 1, 2]
    assert finished.record.status is RunStatus.DONE
    assert same(dict(other.models[-1].state_dict()), finished.weights(best=False))


@pytest.mark.slow
@pytest.mark.parametrize("num_workers", [1, 2])
def test_what_a_callback_raises_comes_out_with_its_place(num_workers: int) -> None:
    """The run can be resumed without that callback, and has the same bits as a whole run."""

    class Failing:
        def after_round(self, record: fl.RoundRecord, model: nn.Module) -> None:
            if record.round_num == 3:
                raise LookupError("a slip of the user's")

    engine = {"num_workers": num_workers, "executor": "vmap"}
    with pytest.raises(LookupError, match="a slip of the user's") as raised:
        run(callbacks=[Failing()], name="broken", engine=engine)
    assert raised.traceback[-1].name == "after_round"
    resumed, whole = run(resume="broken", engine=engine), run(engine=engine)
    assert len(resumed.history) == 6
    assert same(resumed.weights(best=False), whole.weights(best=False))


def test_a_callback_that_answers_with_something_else_is_refused() -> None:
    """A metric returned by mistake must not end the run."""

    class Slip:
        def after_round(self, record: fl.RoundRecord, model: nn.Module) -> Any:
            return record.metrics["accuracy"]

    with pytest.raises(ConfigError, match=r"callbacks: Slip.after_round returned \d.*return True"):
        run(callbacks=[Slip()])


@pytest.mark.slow
def test_the_examples_of_the_guide_run() -> None:
    """In order, on this model and these data."""
    blocks = re.findall(r"^```python\n(.*?)^```$", GUIDE.read_text(), re.MULTILINE | re.DOTALL)
    assert blocks
    names = {"fl": fl, "data": data(), "make_model": make_model, "local": ALGORITHM.local}
    for block in blocks:
        exec(block, names)  # noqa: S102  the guide's own
    finished = names["run"]
    assert isinstance(finished, fl.Run)
    assert finished.record.status is RunStatus.DONE
