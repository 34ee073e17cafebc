"""The weights that a queued run starts from: which are accepted, and when they are decided on."""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import save
from torch import Tensor, nn

from fedlearn import assembly
from fedlearn.config import load
from fedlearn.core.clock import SystemClock
from fedlearn.core.params import Params
from fedlearn.deployment.starting_weights import (
    StartingWeights,
    find_weights,
    pin_weights,
    with_weights,
)
from fedlearn.errors import ConfigError, FedlearnError, StoreError
from fedlearn.rounds.records import Checkpoint
from fedlearn.rounds.scheduling import QueuedRun, Submission, parse_start
from fedlearn.store.queue import WEIGHTS_FILE, RunQueue, weights_folder
from fedlearn.store.runs import Database, StoredRun
from tests.records import RUN

PRIVATE = {"mode": "central", "clip_norm": 1.0, "epsilon": 5.0, "target_delta": 1e-5}


class Tied(nn.Module):
    """A layer whose weights have two names, a trained one in half precision, and a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(3, 3, bias=False)
        self.second = nn.Linear(3, 3, bias=False)
        self.second.weight = self.first.weight
        self.scale = nn.Parameter(torch.ones(2, dtype=torch.bfloat16))
        self.register_buffer("mean", torch.zeros(2))


@pytest.fixture
def components(tmp_path: Path) -> assembly.Deployment:
    (tmp_path / "experiment.toml").write_text(
        'num_rounds = 20\n[data]\nsource = "none"\n[cohort]\nnum_wanted = 2\n'
        f'[model]\nkind = "python"\nfactory = "{__file__}:Tied"\n'
    )
    config = load(tmp_path / "experiment.toml", overrides=())
    return assembly.build_deployment(config, data_dir=tmp_path)


@pytest.fixture
def queue(tmp_path: Path) -> Iterator[RunQueue]:
    url = f"sqlite:///{tmp_path / 'runs.sqlite'}"
    with Database.open(url, runs_dir=tmp_path / "runs") as database:
        yield RunQueue(database, SystemClock())


def weights(value: float, **changes: Tensor | None) -> dict[str, Tensor]:
    """Weights of the model, all of one value; ``None`` leaves one out."""
    module = nn.Module.state_dict(Tied())
    found = {name.replace(".", "__"): torch.full_like(t, value) for name, t in module.items()}
    found |= {"scale": torch.full((2,), value)}  # as a checkpoint has it
    merged: dict[str, Tensor | None] = {**found, **changes}
    return {n.replace("__", "."): t for n, t in merged.items() if t is not None}


def start(**tensors: Tensor) -> StartingWeights:
    return StartingWeights.of({"file": "/w.safetensors"}, save(tensors))


def train(queue: RunQueue, name: str, value: float, *, num_rounds: int) -> StoredRun:
    """Create a run, if there is none, with a checkpoint of weights of one value."""
    database = queue.database
    known = any(each.name == name for each in database.runs())
    stored = database.run(name) if known else database.create(replace(RUN, name=name))
    tensors = {f"params/{each}": value for each, value in weights(value).items()}
    stored.commit(Checkpoint(round_num=num_rounds, tensors=tensors, values={}))
    return stored


def submit(queue: RunQueue, components: assembly.Deployment, source: str) -> QueuedRun:
    parsed = parse_start(source)
    found = find_weights(parsed, components, queue.database)
    content = b"" if found is None else found.content
    start_from = parsed if found is None else found.source
    config = {"num_rounds": RUN.num_rounds}
    queue.submit(Submission(name="new", config=config, start_from=start_from), weights=content)
    return queue.start("new")


def pinned_value(run: QueuedRun, components: assembly.Deployment, queue: RunQueue) -> float:
    started, _ = pin_weights(run, components, queue)
    [value] = {float(each) for each in Params.of(started.make_model()).vector.unique()}
    return value


def test_every_tensor_of_the_model_starts_from_the_weights(
    components: assembly.Deployment,
) -> None:
    model = with_weights(components, start(**weights(7.0))).make_model()
    assert all(bool((each == 7.0).all()) for each in model.state_dict().values())
    assert model.state_dict()["scale"].dtype is torch.bfloat16
    with_weights(components, start(**weights(7.0, second__weight=None)))


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"mean": None}, r"there is no mean, which the model has with shape \[2\]"),
        ({"other": torch.ones(1)}, "other is not in the model"),
        ({"mean": torch.ones(3)}, r"mean has shape \[3\].* the model has shape \[2\]"),
        ({"mean": torch.ones(2).double()}, "mean has .* dtype float64, .* dtype float32"),
        ({"scale": torch.ones(2).double()}, "scale has .* dtype float64, .* dtype bfloat16"),
        ({"mean": torch.tensor([1.0, torch.nan])}, "mean has values that are not finite"),
        ({"second__weight": torch.zeros(3, 3)}, "second.weight and first.weight differ"),
    ],
)
def test_weights_of_another_model_are_refused(
    components: assembly.Deployment, changes: dict[str, Tensor | None], told: str
) -> None:
    with pytest.raises(ConfigError, match=f"w.safetensors: {told}"):
        with_weights(components, start(**weights(1.0, **changes)))


def test_what_is_no_file_of_weights_is_refused(components: assembly.Deployment) -> None:
    with pytest.raises(ConfigError, match="no safetensors file"):
        with_weights(components, StartingWeights.of({"file": "x"}, b"PK\x03\x04 pickled"))


def test_a_file_is_copied_when_the_run_is_submitted(
    components: assembly.Deployment, queue: RunQueue, tmp_path: Path
) -> None:
    file = tmp_path / "mine.safetensors"
    file.write_bytes(save(weights(3.0)))
    run = submit(queue, components, str(file))
    file.unlink()
    assert pinned_value(run, components, queue) == 3.0
    copy = weights_folder(queue.database.runs_dir, "new") / WEIGHTS_FILE
    copy.write_bytes(save(weights(4.0)))
    with pytest.raises(StoreError, match="was changed"):
        pin_weights(run, components, queue)


def test_the_last_model_of_a_run_is_that_of_the_start(
    components: assembly.Deployment, queue: RunQueue
) -> None:
    """It is decided on once: a service that is killed right after starts from the same."""
    train(queue, "old", 1.0, num_rounds=1)
    run = submit(queue, components, "old")
    train(queue, "old", 2.0, num_rounds=2)
    assert pinned_value(run, components, queue) == 2.0
    train(queue, "old", 3.0, num_rounds=3)
    again = queue.find("new")
    assert again.start_from == {**again.start_from, "run": "old", "round": "2"}
    assert pinned_value(again, components, queue) == 2.0
    created = queue.database.create(replace(RUN, name="new"), from_queue=True)
    assert created.record.start_from == again.start_from


def test_the_model_after_a_round_is_that_of_the_submission(
    components: assembly.Deployment, queue: RunQueue
) -> None:
    for num_rounds in (1, 2):
        train(queue, "old", float(num_rounds), num_rounds=num_rounds)
    run = submit(queue, components, "old@1")
    train(queue, "old", 3.0, num_rounds=3)
    assert [each.round_num for each in queue.database.run("old").checkpoints()] == [2, 3]
    assert pinned_value(run, components, queue) == 1.0


@pytest.mark.parametrize(
    ("source", "kind", "told"),
    [
        ("old@9", StoreError, "no checkpoint after round 9; it has: 1"),
        ("later@2", ConfigError, "that run has not begun"),
        ("none.safetensors", StoreError, "cannot read .*none.safetensors"),
    ],
)
def test_weights_that_are_not_there_are_missed_at_submission(
    components: assembly.Deployment,
    queue: RunQueue,
    source: str,
    kind: type[FedlearnError],
    told: str,
) -> None:
    train(queue, "old", 1.0, num_rounds=1)
    with pytest.raises(kind, match=told):
        submit(queue, components, source)


def test_a_private_run_starts_from_no_model_that_was_not_charged(
    components: assembly.Deployment, queue: RunQueue
) -> None:
    privacy = components.config.privacy.model_validate(PRIVATE)
    config = components.config.model_copy(update={"privacy": privacy})
    private = replace(components, config=config)
    train(queue, "open", 1.0, num_rounds=1)
    with pytest.raises(ConfigError, match="open: that run has no differential privacy"):
        submit(queue, private, "open")
    queue.database.create(replace(RUN, name="paid", config={"privacy": PRIVATE}))
    train(queue, "paid", 2.0, num_rounds=1)
    run = submit(queue, private, "paid")
    _, [note] = pin_weights(run, private, queue)
    assert "already charged to the ledger" in note
