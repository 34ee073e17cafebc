"""A training task: reported, cancelled, resumed, read lazily, and split into parts."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import Dataset, IterableDataset

from fedlearn.algorithms.feddyn import DynamicRegularizer
from fedlearn.algorithms.local import LocalSgd, LocalUpdate
from fedlearn.algorithms.objectives import MeanSquaredError
from fedlearn.algorithms.proximal import Proximal
from fedlearn.algorithms.scaffold import ControlVariates
from fedlearn.algorithms.settings import settings_of
from fedlearn.core.messages import ClientId
from fedlearn.core.params import Params
from fedlearn.core.randomness import Seed
from fedlearn.errors import Cancelled, DataError
from fedlearn.training.torch_trainer import TorchTrainer
from fedlearn.training.trainer import (
    UNATTENDED,
    LocalResult,
    NullControl,
    TaskControl,
    TrainContext,
)

LOCAL = LocalSgd(epochs=3, batch_size=4, learning_rate=0.1)
MOMENTUM = Proximal(inner=replace(LOCAL, momentum=0.9, keep_momentum=True), proximal=0.1)
NUM_EXAMPLES, NUM_STEPS = 14, 12  # 4 steps an epoch, two examples in the last


class Counting(nn.Module):
    """A model that counts in ``passes`` each forward pass in training."""

    def __init__(self, passes: list[Tensor] | None = None) -> None:
        super().__init__()
        self.linear = nn.Linear(5, 3)
        self.passes = [] if passes is None else passes

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            self.passes.append(x)
        outputs: Tensor = self.linear(x)
        return outputs


class Replaced(nn.Module):
    """A module whose buffer is reassigned in each forward pass instead of updated in place."""

    mean: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(5, 3)
        self.register_buffer("mean", torch.zeros(3))

    def forward(self, x: Tensor) -> Tensor:
        outputs: Tensor = self.linear(x)
        if self.training:
            self.mean = 0.9 * self.mean + 0.1 * outputs.detach().mean(0)
        return outputs - self.mean


MODELS: dict[str, Callable[[], nn.Module]] = {
    "mlp": lambda: nn.Sequential(nn.Linear(5, 8), nn.ReLU(), nn.Linear(8, 3)),
    "dropout": lambda: nn.Sequential(nn.Linear(5, 8), nn.Dropout(0.5), nn.Linear(8, 3)),
    "batch norm": lambda: nn.Sequential(
        nn.Linear(5, 8), nn.BatchNorm1d(8, momentum=None), nn.Linear(8, 3)
    ),
    "replaced statistic": Replaced,
    "convolution": lambda: nn.Sequential(
        nn.Unflatten(1, (1, 1, 5)), nn.Conv2d(1, 4, (1, 2)), nn.Flatten(), nn.Linear(16, 3)
    ),
}


@dataclass
class Watched(NullControl):
    """A control that records progress, and cancels the task after so many batches."""

    num_allowed: int = 10**9
    num_checked: int = 0
    kept: dict[str, Tensor] = field(default_factory=dict)
    fractions: list[float] = field(default_factory=list)
    losses: list[float] = field(default_factory=list)

    def check(self) -> None:
        if self.num_checked == self.num_allowed:
            raise Cancelled("the user revoked consent")
        self.num_checked += 1

    def report(self, *, fraction: float, loss: float) -> None:
        self.fractions.append(fraction)
        self.losses.append(loss)

    def load(self) -> Mapping[str, Tensor]:
        return self.kept

    def save(self, tensors: Mapping[str, Tensor]) -> None:
        self.kept = {name: value.clone() for name, value in tensors.items()}


class Pairs(Dataset[tuple[Tensor, Tensor]]):
    """A dataset that records which items were read, and adds noise to each."""

    def __init__(self, noise: float = 0.0) -> None:
        self.features, self.labels = examples()
        self.noise, self.read = noise, list[int]()

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, row: int) -> tuple[Tensor, Tensor]:
        self.read.append(row)
        return self.features[row] + self.noise * torch.randn(5), self.labels[row]


def examples(num_examples: int = NUM_EXAMPLES) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    features = torch.randn(num_examples, 5, generator=generator)
    return features, torch.randint(0, 3, (num_examples,), generator=generator)


def initial(make_model: Callable[[], nn.Module]) -> Mapping[str, Tensor]:
    torch.manual_seed(0)
    return Params.of(make_model()).to_tensors()


def context(local: LocalUpdate = LOCAL, control: TaskControl = UNATTENDED) -> TrainContext:
    return TrainContext(
        client_id=ClientId(2),
        round_num=3,
        settings=settings_of(local),
        seed=Seed(4),
        state={},
        control=control,
    )


def trained(
    trainer: TorchTrainer,
    make_model: Callable[[], nn.Module] = MODELS["mlp"],
    *,
    local: LocalUpdate = LOCAL,
    control: TaskControl = UNATTENDED,
) -> LocalResult:
    return trainer.train(initial(make_model), context=context(local, control))


def assert_same(found: LocalResult, expected: LocalResult) -> None:
    """Compare model, metrics and client state bit for bit."""
    assert found.metrics == expected.metrics
    for one, other in ((found.tensors, expected.tensors), (found.state, expected.state)):
        assert one.keys() == other.keys()
        assert all(torch.equal(one[name], other[name]) for name in one)


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("num_done", [1, 5, 11, 12])
@pytest.mark.parametrize("num_parts", [1, 2])
def test_a_killed_task_goes_on_to_the_same_bits(name: str, num_done: int, num_parts: int) -> None:
    """In a new trainer, as in a new process, after any step; no batch is computed twice."""
    make_model = MODELS[name]

    def trainer() -> TorchTrainer:
        return TorchTrainer.of(make_model, *examples(16), gradient_accumulation=num_parts)

    whole = trained(trainer(), make_model, local=MOMENTUM)
    killed = Watched(num_allowed=num_done * num_parts)
    if num_done < NUM_STEPS:
        with pytest.raises(Cancelled):
            trained(trainer(), make_model, local=MOMENTUM, control=killed)
    else:  # between its last step and its reply
        trained(trainer(), make_model, local=MOMENTUM, control=killed)
    restarted = Watched(kept=killed.kept)
    found = trained(trainer(), make_model, local=MOMENTUM, control=restarted)
    assert_same(found, whole)
    assert restarted.num_checked == (NUM_STEPS - num_done) * num_parts


@pytest.mark.parametrize(
    "local",
    [DynamicRegularizer(inner=LOCAL, alpha=0.1), ControlVariates(inner=LOCAL, control_bound=None)],
    ids=lambda each: type(each).__name__,
)
@pytest.mark.parametrize("num_done", [1, 11, 12])
def test_what_a_rule_changes_as_it_begins_is_changed_once(
    local: LocalUpdate, num_done: int
) -> None:
    """A training that is resumed begins, too. Control: a checkpoint that is changed shows."""
    name = "control" if isinstance(local, ControlVariates) else "drift"
    params = initial(MODELS["mlp"])
    size = sum(params[each].numel() for each in params)
    own = torch.linspace(-0.2, 0.3, size)
    given = replace(context(local), state={name: own}, broadcast={"control": own.flip(0) / 3})

    def train(control: TaskControl = UNATTENDED) -> LocalResult:
        trainer = TorchTrainer.of(MODELS["mlp"], *examples(16))
        return trainer.train(params, context=replace(given, control=control))

    whole, killed = train(), Watched(num_allowed=num_done)
    with pytest.raises(Cancelled) if num_done < NUM_STEPS else nullcontext():
        train(killed)
    assert_same(train(Watched(kept=killed.kept)), whole)
    changed = {
        each: 2 * value if each.startswith(f"memory.{name}") else value
        for each, value in killed.kept.items()
    }
    found = train(Watched(kept=changed))
    assert not all(torch.equal(found.state[each], whole.state[each]) for each in whole.state)


def test_a_lost_velocity_would_be_noticed() -> None:
    """The control: from an altered checkpoint another model results."""
    killed = Watched(num_allowed=5)
    with pytest.raises(Cancelled):
        trained(TorchTrainer.of(MODELS["mlp"], *examples()), local=MOMENTUM, control=killed)
    kept = {n: v * 0 if n.startswith("memory.velocity") else v for n, v in killed.kept.items()}
    found = trained(
        TorchTrainer.of(MODELS["mlp"], *examples()), local=MOMENTUM, control=Watched(kept=kept)
    )
    whole = trained(TorchTrainer.of(MODELS["mlp"], *examples()), local=MOMENTUM)
    assert not torch.equal(found.tensors["0.weight"], whole.tensors["0.weight"])


def test_a_checkpoint_of_something_else_is_not_continued() -> None:
    """If the data or the network changed while the client was off, its task starts over."""
    killed = Watched(num_allowed=5)
    with pytest.raises(Cancelled):
        trained(TorchTrainer.of(MODELS["mlp"], *examples()), control=killed)
    grown = TorchTrainer.of(MODELS["mlp"], *examples(NUM_EXAMPLES + 1))
    assert_same(trained(grown, control=Watched(kept=killed.kept)), trained(grown))
    other = TorchTrainer.of(Counting, *examples())
    for kept in (killed.kept, {"epoch": torch.ones(())}):
        found = trained(other, Counting, control=Watched(kept=kept))
        assert_same(found, trained(other, Counting))


@pytest.mark.parametrize("num_allowed", [0, 1, 7])
def test_a_task_that_is_called_off_computes_no_further_batch(num_allowed: int) -> None:
    """And the trainer can run the next task."""
    passes = list[Tensor]()
    trainer = TorchTrainer.of(lambda: Counting(passes), *examples())
    with pytest.raises(Cancelled, match="revoked"):
        trained(trainer, Counting, control=Watched(num_allowed=num_allowed))
    assert len(passes) == num_allowed
    fresh = trained(TorchTrainer.of(Counting, *examples()), Counting)
    assert_same(trained(trainer, Counting), fresh)


def test_a_task_is_called_off_between_the_parts_of_a_batch() -> None:
    """A batch that is long enough to be split is too long to wait for."""
    passes = list[Tensor]()
    trainer = TorchTrainer.of(lambda: Counting(passes), *examples(), gradient_accumulation=2)
    with pytest.raises(Cancelled):
        trained(trainer, Counting, control=Watched(num_allowed=3))
    assert len(passes) == 3


def test_a_statistic_survives_a_task_that_was_called_off() -> None:
    """A buffer that the cancelled task reassigned does not leak into the next one."""
    trainer = TorchTrainer.of(Replaced, *examples())
    with pytest.raises(Cancelled):
        trained(trainer, Replaced, control=Watched(num_allowed=5))
    assert_same(
        trained(trainer, Replaced), trained(TorchTrainer.of(Replaced, *examples()), Replaced)
    )


def test_progress_is_reported_after_every_step() -> None:
    """Up to 100 %, with losses whose weighted mean is the result's loss."""
    control = Watched()
    result = trained(TorchTrainer.of(MODELS["mlp"], *examples()), control=control)
    assert control.fractions == [step / NUM_STEPS for step in range(1, NUM_STEPS + 1)]
    sizes = [4, 4, 4, 2] * 3
    mean = sum(s * loss for s, loss in zip(sizes, control.losses, strict=True)) / sum(sizes)
    assert result.metrics["loss"] == pytest.approx(mean, rel=1e-12)


@pytest.mark.parametrize("num_parts", [2, 3, 4, 9])
@pytest.mark.parametrize("name", ["mlp", "sequences"])
def test_parts_of_a_batch_make_the_step_of_the_whole(num_parts: int, name: str) -> None:
    """Within float tolerance, for unequal parts and for batches smaller than ``num_parts``."""

    def make_model() -> nn.Module:
        return MODELS["mlp"]() if name == "mlp" else nn.Conv1d(5, 3, 1)

    features, labels = examples()
    if name == "sequences":
        features = torch.stack([features, features.flip(0)], 2)
        labels = torch.stack([labels, labels.flip(0)], 1)
        labels[::3, 0], labels[1], labels[-1] = -100, -100, -100
    whole = trained(TorchTrainer.of(make_model, features, labels), make_model, local=MOMENTUM)
    cut = TorchTrainer.of(make_model, features, labels, gradient_accumulation=num_parts)
    found = trained(cut, make_model, local=MOMENTUM)
    for tensor, value in whole.tensors.items():
        torch.testing.assert_close(found.tensors[tensor], value, rtol=1e-5, atol=1e-6)
    assert found.metrics["loss"] == pytest.approx(whole.metrics["loss"], rel=1e-5)
    assert found.num_examples == whole.num_examples


def test_parts_have_dropout_masks_of_their_own() -> None:
    """Two equal halves of a batch do not drop the same units."""
    seen: list[Tensor] = []

    class Seen(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear, self.dropout = nn.Linear(5, 3), nn.Dropout(0.5)

        def forward(self, x: Tensor) -> Tensor:
            dropped: Tensor = self.dropout(x)
            seen.append(dropped == 0)
            outputs: Tensor = self.linear(dropped)
            return outputs

    data = torch.ones(8, 5), torch.zeros(8, dtype=torch.int64)
    trainer = TorchTrainer.of(Seen, *data, gradient_accumulation=2)
    trained(trainer, Seen, local=replace(LOCAL, epochs=1, batch_size=8))
    assert len(seen) == 2
    assert not torch.equal(*seen)


@pytest.mark.parametrize("num_parts", [1, 3])
def test_a_dataset_trains_as_its_tensors_do(num_parts: int) -> None:
    """Bit for bit, in training and evaluation."""
    dataset = TorchTrainer.of(MODELS["mlp"], Pairs(), gradient_accumulation=num_parts)
    tensors = TorchTrainer.of(MODELS["mlp"], *examples(), gradient_accumulation=num_parts)
    assert_same(trained(dataset), trained(tensors))
    weights = initial(MODELS["mlp"])
    assert dataset.evaluate(weights) == tensors.evaluate(weights)


def test_a_dataset_is_read_when_it_is_needed() -> None:
    """Nothing at first, then one part at a time: a dataset may be larger than memory."""
    dataset = Pairs()
    trainer = TorchTrainer.of(MODELS["mlp"], dataset, gradient_accumulation=2)
    assert not dataset.read
    with pytest.raises(Cancelled):
        trained(trainer, control=Watched(num_allowed=3))
    assert len(dataset.read) == 3 * 2, "three halves of batches of four"


def test_augmentation_is_a_function_of_the_task() -> None:
    """Random items repeat after a restart, differ between epochs, and use no other generator."""
    trainer = TorchTrainer.of(MODELS["mlp"], Pairs(noise=0.5))
    torch.manual_seed(7)
    before = torch.random.get_rng_state()
    weights = initial(MODELS["mlp"])
    torch.random.set_rng_state(before)
    first = trainer.train(weights, context=context())
    assert torch.equal(torch.random.get_rng_state(), before)
    killed = Watched(num_allowed=5)
    with pytest.raises(Cancelled):
        trained(trainer, control=killed)
    assert_same(trained(trainer, control=Watched(kept=killed.kept)), first)
    plain = trained(TorchTrainer.of(MODELS["mlp"], Pairs()))
    assert first.metrics != plain.metrics


@pytest.mark.parametrize(
    ("max_steps", "num_steps", "num_examples"), [(1, 1, 4), (4, 4, 14), (6, 6, 14), (99, 12, 14)]
)
def test_a_budget_of_steps_ends_a_task_early(
    max_steps: int, num_steps: int, num_examples: int
) -> None:
    """Its weight counts the examples seen; the steps are the first ones of the whole task."""
    control, whole = Watched(), Watched()
    trainer = TorchTrainer.of(MODELS["mlp"], *examples(), max_steps=max_steps)
    result = trained(trainer, control=control)
    trained(TorchTrainer.of(MODELS["mlp"], *examples()), control=whole)
    assert control.num_checked == num_steps
    assert control.fractions[-1] == 1.0
    assert control.losses == whole.losses[:num_steps]
    assert result.num_examples == num_examples


def test_mixed_precision_computes_in_bfloat16_and_keeps_float32() -> None:
    """The update points in nearly the same direction; the tensors stay float32."""
    seen: list[torch.dtype] = []

    def make_model() -> nn.Module:
        network = MODELS["mlp"]()
        network.register_forward_hook(lambda _module, _inputs, out: seen.append(out.dtype))
        return network

    mixed = trained(TorchTrainer.of(make_model, *examples(), precision="bfloat16"))
    assert set(seen) == {torch.bfloat16}
    plain = trained(TorchTrainer.of(MODELS["mlp"], *examples()))
    for name, value in mixed.tensors.items():
        assert value.dtype == torch.float32
        torch.testing.assert_close(value, plain.tensors[name], rtol=0.0, atol=0.02)
        assert not torch.equal(value, plain.tensors[name])


@pytest.mark.parametrize("as_dataset", [True, False])
def test_the_test_examples_are_evaluated(*, as_dataset: bool) -> None:
    """Only these, if there are any; training does not see them."""
    features, labels = examples()
    test = Pairs() if as_dataset else (features, labels)
    weights = initial(MODELS["mlp"])
    found = TorchTrainer.of(MODELS["mlp"], features[:3], labels[:3], test=test).evaluate(weights)
    assert found == TorchTrainer.of(MODELS["mlp"], features, labels).evaluate(weights)
    assert found.num_examples == NUM_EXAMPLES
    assert set(found.metrics) == {"loss", "accuracy"}


def test_an_evaluation_that_is_called_off_ends_before_the_next_batch() -> None:
    """The module is left as it was; in the control the evaluation visits all batches."""
    features, labels = examples(600)
    trainer = TorchTrainer.of(MODELS["dropout"], features, labels)
    weights, control = initial(MODELS["dropout"]), Watched(num_allowed=1)
    with pytest.raises(Cancelled, match="revoked"):
        trainer.evaluate(weights, control=control)
    assert control.num_checked == 1
    assert_same(
        trained(trainer, MODELS["dropout"]),
        trained(TorchTrainer.of(MODELS["dropout"], features, labels), MODELS["dropout"]),
    )
    patient = Watched()
    assert trainer.evaluate(weights, control=patient).num_examples == 600
    assert patient.num_checked == 3


def test_a_trainer_says_how_much_it_has_and_where_it_computes() -> None:
    """The coordinator selects clients by it: training examples only, not test examples."""
    features, labels = examples()
    trainer = TorchTrainer.of(
        MODELS["mlp"], features[:3], labels[:3], test=(features, labels), device="cpu"
    )
    assert (trainer.num_examples, trainer.device) == (3, torch.device("cpu"))
    assert TorchTrainer.of(MODELS["mlp"], Pairs()).num_examples == NUM_EXAMPLES


def test_the_objective_is_the_applications() -> None:
    """For example for a regression."""
    features = examples()[0]
    trainer = TorchTrainer.of(
        lambda: nn.Linear(5, 1), features, features[:, :1], objective=MeanSquaredError()
    )
    result = trained(trainer, lambda: nn.Linear(5, 1), local=replace(LOCAL, epochs=50))
    assert trainer.evaluate(result.tensors).metrics["loss"] < 0.01


def test_a_failed_evaluation_leaves_training_as_it_was() -> None:
    """The module returns to training mode."""
    features, labels = examples()
    wrong = (features[:, :4], labels)
    trainer = TorchTrainer.of(MODELS["dropout"], features, labels, test=wrong)
    with pytest.raises(RuntimeError):
        trainer.evaluate(initial(MODELS["dropout"]))
    expected = TorchTrainer.of(MODELS["dropout"], features, labels)
    found = trained(trainer, MODELS["dropout"])
    assert_same(found, trained(expected, MODELS["dropout"]))


class Gated(nn.Module):
    """A model with two inputs: ``ids`` are integers, the gate is boolean."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(7, 4)
        self.head = nn.Linear(4, 3)

    def forward(self, ids: Tensor, gate: Tensor) -> Tensor:
        outputs: Tensor = self.head((self.embedding(ids) * gate.unsqueeze(-1)).sum(1))
        return outputs


class Items(Dataset[Any]):  # Any: features of any form
    """A dataset of several inputs, each row a dict or a tuple."""

    def __init__(self, inputs: tuple[Tensor, Tensor], labels: Tensor, *, as_dict: bool) -> None:
        self.inputs, self.labels, self.as_dict = inputs, labels, as_dict

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, row: int) -> tuple[Any, int]:
        ids, gate = (each[row] for each in self.inputs)
        features = {"gate": gate.numpy(), "ids": ids} if self.as_dict else (ids, gate)
        return features, int(self.labels[row])


def gated() -> tuple[tuple[Tensor, Tensor], Tensor]:
    generator = torch.Generator().manual_seed(3)
    ids = torch.randint(0, 7, (NUM_EXAMPLES, 5), generator=generator)
    gate = torch.rand(NUM_EXAMPLES, 5, generator=generator) < 0.6
    return (ids, gate), ids.sum(1) % 3


@pytest.mark.parametrize("num_parts", [1, 2])
def test_several_inputs_train_from_tensors_and_from_a_dataset(num_parts: int) -> None:
    """Tuples pass by position, dicts by name, and all results agree bit for bit."""
    (ids, gate), labels = gated()
    inputs: list[Any] = [((ids, gate), labels), ({"gate": gate, "ids": ids}, labels)]
    datasets = [(Items((ids, gate), labels, as_dict=each),) for each in (False, True)]
    results = []
    for given in (*inputs, *datasets):
        trainer = TorchTrainer.of(Gated, *given, gradient_accumulation=num_parts)
        assert trainer.num_examples == NUM_EXAMPLES
        trainer.try_out()
        results.append(trained(trainer, Gated))
        assert trainer.evaluate(results[-1].tensors).num_examples == NUM_EXAMPLES
    for result in results[1:]:
        assert_same(result, results[0])
    swapped = TorchTrainer.of(Gated, (ids, ~gate), labels, gradient_accumulation=num_parts)
    with pytest.raises(AssertionError):
        assert_same(trained(swapped, Gated), results[0])


def test_the_test_examples_may_have_several_inputs() -> None:
    """As tensors and as a dataset."""
    inputs, labels = gated()
    as_tensors = TorchTrainer.of(Gated, inputs, labels, test=(inputs, labels))
    dataset = Items(inputs, labels, as_dict=True)
    as_dataset = TorchTrainer.of(Gated, inputs, labels, test=dataset)
    weights = initial(Gated)
    assert as_tensors.evaluate(weights) == as_dataset.evaluate(weights)


class Ragged(Items):
    """A dataset whose last row has another length, or lacks an input."""

    def __getitem__(self, row: int) -> tuple[Any, int]:
        features, label = super().__getitem__(row)
        if row < len(self) - 1:
            return features, label
        return ({"ids": features["ids"]} if self.as_dict else (features[0][:2], features[1])), label


@pytest.mark.parametrize(
    ("as_dict", "message"),
    [
        (False, r"has input 0 of shape \(2,\) and torch.int64, others have \(5,\)"),
        (True, r"dataset\[\d+\] has .*input 'ids'.*; give every row the same inputs"),
    ],
)
def test_a_ragged_dataset_is_refused_with_the_row_and_the_input(
    *, as_dict: bool, message: str
) -> None:
    """A DataLoader would only say that it cannot stack."""
    trainer = TorchTrainer.of(Gated, Ragged(*gated(), as_dict=as_dict))
    with pytest.raises(DataError, match=message):
        trainer.evaluate(initial(Gated))


class Endless(IterableDataset[tuple[Tensor, Tensor]]):
    """A dataset without a length."""

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        return iter(Pairs())


class Bare(Pairs):
    """A dataset whose items are features without a label."""

    def __getitem__(self, row: int) -> Any:  # Any: the wrong type is the point
        return self.features[row]


class Empty(Pairs):
    """An empty dataset."""

    def __len__(self) -> int:
        return 0


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: TorchTrainer.of(Counting, Empty()), "the dataset has no examples"),
        (lambda: TorchTrainer.of(Counting, Endless()), "the dataset is a Endless, not a map-style"),
        (lambda: TorchTrainer.of(Counting, examples()[0]), "features without labels"),
        (lambda: TorchTrainer.of(Counting, Pairs(), examples()[1]), "include its labels"),
        (lambda: TorchTrainer.of(Counting, Bare()).try_out(), r"dataset\[0\] is not a pair"),
    ],
)
def test_data_that_cannot_be_trained_on_are_refused(
    make: Callable[[], object], message: str
) -> None:
    """The error says what they are and what to pass instead."""
    with pytest.raises(DataError, match=message):
        make()


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (
            lambda: TorchTrainer.of(Counting, Pairs(), gradient_accumulation=0),
            "gradient_accumulation is 0; give a whole number >= 1",
        ),
        (lambda: TorchTrainer.of(Counting, Pairs(), max_steps=0), "max_steps is 0; give a whole"),
        (lambda: TorchTrainer.of(Counting, Pairs(), precision="half"), "precision is 'half'"),
        (lambda: TorchTrainer.of(Counting, Pairs(), device="abacus"), 'device is "abacus"'),
    ],
)
def test_options_out_of_range_are_refused(make: Callable[[], object], message: str) -> None:
    """The error has the value and the range."""
    with pytest.raises(ValueError, match=message):
        make()
