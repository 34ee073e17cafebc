"""Trainings that a client's process shares with worker processes."""

import os
import signal
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from fedlearn.algorithms.local import LocalSgd
from fedlearn.algorithms.settings import settings_of
from fedlearn.client.loading import make_trainer
from fedlearn.client.options import Resources, RuntimeOptions
from fedlearn.client.sharing import make_client_trainer
from fedlearn.core.messages import ClientId
from fedlearn.core.params import Params
from fedlearn.core.randomness import Seed
from fedlearn.errors import Cancelled, DeploymentError, ProcessesParted, SettingsRefused
from fedlearn.parallel.shared_trainer import SharedTrainer
from fedlearn.training.trainer import LocalResult, NullControl, TrainContext
from tests.processes import children_of

pytestmark = pytest.mark.slow

TRAINERS = '''
import os

import torch
from torch import nn

from fedlearn.client import TorchTrainer


class Examples(torch.utils.data.Dataset):
    """29 examples; the last is none where a file says so."""

    def __len__(self):
        return 29

    def __getitem__(self, row):
        if row == 28 and os.path.exists(BROKEN):
            raise ZeroDivisionError("of example 28")
        if row == 28 and os.path.exists(MALFORMED):
            return "no pair"
        generator = torch.Generator().manual_seed(row)
        return torch.randn(5, generator=generator, dtype=torch.float64), row % 3


BROKEN, MALFORMED = (os.path.join(os.path.dirname(__file__), name) for name in ("broken", "odd"))


def model():
    return nn.Linear(5, 3).double()


def trainer():
    return TorchTrainer.of(model, Examples(), device="cpu")


def normalized():
    layers = lambda: nn.Sequential(nn.Linear(5, 4), nn.BatchNorm1d(4), nn.Linear(4, 3)).double()
    return TorchTrainer.of(layers, Examples(), device="cpu")


def divided():
    """As a trainer that divides its examples by chance."""
    rows = torch.randn(29, 5), torch.randint(0, 3, (29,))
    return TorchTrainer.of(lambda: nn.Linear(5, 3), *rows, device="cpu")


def drifting():
    class Noisy(nn.Linear):
        def forward(self, inputs):
            self.seen.add_(os.getpid())
            return super().forward(inputs)

    def make():
        made = Noisy(5, 3).double()
        made.register_buffer("seen", torch.zeros(1, dtype=torch.float64))
        return made

    return TorchTrainer.of(make, Examples(), device="cpu")


class Own:
    honors = ()

    def train(self, tensors, *, context): ...

    def evaluate(self, tensors, *, control): ...
'''

#: Eight batches per epoch; the last has one example, so the first process has nothing to do.
SGD = LocalSgd(epochs=2, batch_size=4, learning_rate=0.1, momentum=0.9, keep_momentum=True)
CONTEXT = TrainContext(
    client_id=ClientId(4), round_num=1, settings=settings_of(SGD), seed=Seed(9), state={}
)


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The file that defines the trainers."""
    path = tmp_path_factory.mktemp("trainers") / "shared_trainers.py"
    path.write_text(TRAINERS)
    return path


def options(file: Path, name: str, num_workers: int) -> RuntimeOptions:
    return RuntimeOptions(
        home=file.parent / "home",
        trainer=f"{file}:{name}",
        resources=Resources(num_workers=num_workers),
    )


@pytest.fixture(scope="module")
def shared(file: Path) -> Iterator[SharedTrainer]:
    """A trainer that uses two processes."""
    trainer = make_client_trainer(options(file, "trainer", 2))
    assert isinstance(trainer, SharedTrainer)
    yield trainer
    trainer.close()


@pytest.fixture(scope="module")
def alone(file: Path) -> LocalResult:
    """The result of the same training in one process."""
    return make_trainer(f"{file}:trainer").train(weights(), context=CONTEXT)


def test_a_client_may_have_no_trainer(file: Path) -> None:
    """It then has no workers either, which would do nothing."""
    none = replace(options(file, "trainer", 1), trainer=None)
    assert make_client_trainer(none) is None
    with pytest.raises(DeploymentError, match="2 workers need a trainer"):
        make_client_trainer(replace(options(file, "trainer", 2), trainer=None))


def weights() -> Mapping[str, Tensor]:
    values = torch.linspace(-0.5, 0.5, 18, dtype=torch.float64)
    return Params.of(nn.Linear(5, 3).double()).layout.views(values)


def same(result: LocalResult, other: LocalResult) -> bool:
    """Return whether two results are equal bit for bit."""
    return all(
        torch.equal(theirs[name], value)
        for ours, theirs in ((result.tensors, other.tensors), (result.state, other.state))
        for name, value in ours.items()
    )


def workers() -> list[int]:
    """Return the worker processes of a shared training; this process also has other children."""
    return [
        child
        for child in children_of(os.getpid())
        if b"worker_process" in Path(f"/proc/{child}/cmdline").read_bytes()
    ]


class Watched(NullControl):
    """A task control that keeps the last checkpoint and triggers an event at one batch.

    Args:
        nth: Index of the batch, from 0.
        happens: The event: ``"kill"``, ``"call off"`` or ``"fail"``.
    """

    def __init__(self, nth: int = -1, happens: str = "") -> None:
        self.nth, self.happens, self.num_checks = nth, happens, 0
        self.kept: dict[str, Tensor] = {}
        self.reports = list[float]()

    def check(self) -> None:
        """Trigger the event at its batch."""
        self.num_checks += 1
        if self.num_checks != self.nth + 1:
            return
        if self.happens == "kill":
            os.kill(workers()[0], signal.SIGKILL)
        raise_ = {"call off": Cancelled, "fail": ZeroDivisionError}.get(self.happens)
        if raise_ is not None:
            raise raise_

    def report(self, *, fraction: float, loss: float) -> None:
        """Record the progress."""
        self.reports.append(fraction)

    def load(self) -> Mapping[str, Tensor]:
        """Return a copy, as if loaded from disk."""
        return {name: value.clone() for name, value in self.kept.items()}

    def save(self, tensors: Mapping[str, Tensor]) -> None:
        """Keep a copy."""
        self.kept = {name: value.clone() for name, value in tensors.items()}


def train(shared: SharedTrainer, control: NullControl) -> LocalResult:
    return shared.train(weights(), context=replace(CONTEXT, control=control))


def test_processes_come_to_what_one_comes_to(shared: SharedTrainer, alone: LocalResult) -> None:
    """Weights, state, loss and count agree; the first process's control sees every batch."""
    control = Watched()
    result = train(shared, control)
    for name, value in alone.tensors.items():
        torch.testing.assert_close(result.tensors[name], value, rtol=1e-12, atol=1e-14)
    for name, value in alone.state.items():
        torch.testing.assert_close(result.state[name], value, rtol=1e-12, atol=1e-14)
    assert result.num_examples == alone.num_examples == shared.num_examples == 29
    assert result.metrics["loss"] == pytest.approx(alone.metrics["loss"], rel=1e-12)
    assert len(control.reports) == control.num_checks == 16
    assert same(train(shared, Watched()), result)
    assert shared.evaluate(weights()).num_examples == 29


@pytest.mark.parametrize(
    ("happens", "raised"),
    [("call off", Cancelled), ("fail", ZeroDivisionError), ("kill", ProcessesParted)],
)
def test_a_task_that_was_interrupted_goes_on_to_the_bit(
    shared: SharedTrainer, happens: str, raised: type[Exception]
) -> None:
    """It resumes from the first process's checkpoint, and killed workers are replaced."""
    whole, before = train(shared, Watched()), workers()
    control = Watched(5, happens)
    with pytest.raises(raised) as error:
        train(shared, control)
    if happens == "kill":
        assert str(error.value) == (
            "process 2 of the 2 that share this training was killed by SIGKILL"
        )
    control.num_checks, control.nth = 0, -1
    assert same(train(shared, control), whole)
    assert control.num_checks < 16
    assert (workers() == before) == (happens != "kill")


def test_what_a_worker_fails_of_is_told_without_its_words(
    shared: SharedTrainer, file: Path
) -> None:
    """Only the error's type is reported, as the message may quote data. The next task works."""
    in_order = replace(CONTEXT, settings=settings_of(replace(SGD, epochs=1, shuffle=False)))
    for name in ("odd", "broken"):
        mark = file.parent / name
        mark.touch()
        try:
            with pytest.raises(ProcessesParted, match="failed: DataError") as error:
                shared.train(weights(), context=in_order)  # the last example is the worker's
        finally:
            mark.unlink()
        assert "28" not in str(error.value)
        assert train(shared, Watched()).num_examples == 29


def test_settings_that_all_refuse_leave_the_workers_where_they_are(shared: SharedTrainer) -> None:
    """Each process refuses them by itself, so none has to be restarted."""
    before = workers()
    unknown = replace(CONTEXT, settings={**CONTEXT.settings, "no_such_setting": 1})
    with pytest.raises(SettingsRefused, match="no_such_setting"):
        shared.train(weights(), context=unknown)
    assert train(shared, Watched()).num_examples == 29
    assert workers() == before


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("Own", "num_workers is 2, but the trainer is a Own with its own training loop"),
        ("normalized", r"layer 1 \(BatchNorm1d\) computes with all examples of a batch"),
        (
            "divided",
            "process 2 of the 2 .* has different examples, a different model or different limits",
        ),
    ],
)
def test_a_trainer_that_cannot_be_shared_is_refused_at_the_start(
    file: Path, name: str, words: str
) -> None:
    """With the reason, and without leaving workers. With one process it is not checked."""
    before = workers()
    with pytest.raises(DeploymentError, match=words):
        make_client_trainer(options(file, name, 2))
    assert workers() == before
    assert not isinstance(make_client_trainer(options(file, name, 1)), SharedTrainer)


def test_a_model_that_is_another_in_each_process_is_told_from_one(file: Path) -> None:
    """As with a forward pass that keeps statistics of its own examples."""
    trainer = make_client_trainer(options(file, "drifting", 2))
    assert isinstance(trainer, SharedTrainer)
    tensors = {**weights(), "seen": torch.zeros(1, dtype=torch.float64)}
    with pytest.raises(ProcessesParted, match="has a different model after the training"):
        trainer.train(tensors, context=CONTEXT)
    trainer.close()
