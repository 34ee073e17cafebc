"""The fused executor equals the sequential reference, and recognizes the models it can train."""

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import ClassVar

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn import functional as F

from fedlearn.algorithms.feddyn import DynamicRegularizer
from fedlearn.algorithms.fedrep import HeadThenBody
from fedlearn.algorithms.lanes import LaneSpec, Over
from fedlearn.algorithms.local import (
    Affine,
    LocalSgd,
    LocalUpdate,
    LocalUpdateWrapper,
    Memory,
    MemorySpec,
    Moment,
    Tensors,
    add_scaled,
    iter_updates,
    unsqueeze_like,
)
from fedlearn.algorithms.objectives import CrossEntropy, MeanSquaredError
from fedlearn.algorithms.per_fedavg import MetaGradient
from fedlearn.algorithms.proximal import Proximal
from fedlearn.algorithms.qfedavg import FairUpdate
from fedlearn.algorithms.rate_schedules import ScheduledRate
from fedlearn.algorithms.scaffold import ControlVariates
from fedlearn.core.features import require_single_input
from fedlearn.core.params import Layout, Params
from fedlearn.core.randomness import Seed
from fedlearn.simulation.executors.base import TrainedBlock, Work
from fedlearn.simulation.executors.fused.chain import Chain, Layer, NotAChain, as_chain
from fedlearn.simulation.executors.fused.executor import (
    FusedExecutor,
    choose_block_size,
    describe_misfit,
)
from fedlearn.simulation.executors.sequential import SequentialExecutor
from fedlearn.simulation.population import ClientRows
from fedlearn.simulation.schedule import schedule
from fedlearn.training.resident import Precision, ResidentModel

CPU = torch.device("cpu")
NUM_CLASSES = 5
NUM_ROWS = 60
PLAIN = LocalSgd(epochs=1, batch_size=4, learning_rate=0.1)


def mlp() -> nn.Sequential:
    return nn.Sequential(nn.Linear(12, 9), nn.ReLU(), nn.Linear(9, NUM_CLASSES))


def build_pooled_cnn() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(2, 3, 3, padding=1),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(3, 4, 3, padding=1, bias=False),
        nn.Tanh(),
        nn.AvgPool2d(2),
        nn.Flatten(),
        nn.Linear(16, NUM_CLASSES),
    )


def odd_cnn() -> nn.Module:
    """All settings of a window, consecutive activations, and a linear layer without bias."""
    return nn.Sequential(
        nn.Identity(),
        nn.Conv2d(2, 3, (3, 2), stride=(1, 2), padding=(2, 1), dilation=(2, 1)),
        nn.LeakyReLU(0.2),  # first, where some values are negative
        nn.Sigmoid(),
        nn.Tanh(),
        nn.MaxPool2d(3, stride=1, padding=1, ceil_mode=True),
        nn.AvgPool2d(2, stride=2, padding=1, count_include_pad=False),
        nn.Conv2d(3, 2, 3, padding="same"),
        nn.Flatten(),
        nn.ReLU(),
        nn.Linear(30, 7, bias=False),
        nn.Sigmoid(),
        nn.Linear(7, NUM_CLASSES),
    )


class WrittenByHand(nn.Module):
    """A chain of the same kind, as users write it."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(2, 3, 3)
        self.hidden = nn.Linear(27, 6)
        self.head = nn.Linear(6, NUM_CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        x = F.max_pool2d(F.relu(self.conv(x)), 2)
        x = x.view(x.size(0), -1)
        x = torch.relu(self.hidden(x)).reshape(-1, 6)
        x = torch.flatten(x, 1).flatten(1).view(x.shape[0], 6)
        logits: Tensor = self.head(F.leaky_relu(x.tanh().sigmoid(), 0.1))
        return logits


MODELS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "mlp": (mlp, (12,)),
    "logistic regression": (lambda: nn.Linear(12, NUM_CLASSES), (12,)),
    "flattened images": (lambda: nn.Sequential(nn.Flatten(), *mlp()), (1, 3, 4)),
    "pooled cnn": (build_pooled_cnn, (2, 8, 8)),
    "odd cnn": (odd_cnn, (2, 8, 8)),
    "written by hand": (WrittenByHand, (2, 8, 8)),
}


def chain_of(module: nn.Module) -> Chain:
    chain = as_chain(module, Layout.of(module))
    assert isinstance(chain, Chain), chain
    return chain


def work_for(
    model: str, local: LocalUpdate, *, num_examples: list[int], dtype: torch.dtype, seed: int = 0
) -> Work:
    make, shape = MODELS[model]
    torch.manual_seed(seed)
    params = Params.of(make().to(dtype))
    features = torch.randn(NUM_ROWS, *shape, dtype=dtype)
    labels = torch.randint(0, NUM_CLASSES, (NUM_ROWS,))
    sizes = np.array(sorted(num_examples, reverse=True))
    offsets = np.concatenate([[0], np.cumsum(sizes)])
    chosen = np.random.default_rng(seed).integers(0, NUM_ROWS, offsets[-1])
    client_ids = np.arange(len(sizes)) * 3
    plan = schedule(
        local.work,
        ClientRows(features, labels, chosen, offsets),
        client_ids,
        round_num=2,
        seed=Seed(seed),
        dtype=dtype,
        device=CPU,
    )
    kept = torch.randn(len(sizes), params.layout.size, dtype=dtype) * 0.01
    is_controlled = any(isinstance(piece, ControlVariates) for piece in iter_updates(local))
    return Work(
        params=params,
        local=local,
        client_ids=client_ids,
        features=features,
        labels=labels,
        schedule=plan,
        round_num=2,
        seed=Seed(seed),
        rows_K=np.split(chosen, offsets[1:-1]),
        broadcast={"control": kept.flip(1).mean(0)} if is_controlled else {},
        client_state={name: kept for name, spec in local.memory.items() if spec.is_kept},
    )


def by_reference(model: str, work: Work) -> TrainedBlock:
    make, _ = MODELS[model]
    resident = ResidentModel(
        lambda: make().to(work.params.layout.dtype),
        CrossEntropy(),
        device=CPU,
        precision=Precision.FLOAT32,
    )
    return SequentialExecutor(resident).train(work)


def fused_executor(model: str, work: Work) -> FusedExecutor:
    make, _ = MODELS[model]
    chain = chain_of(make().to(work.params.layout.dtype))
    fits = describe_misfit(
        chain, objective=CrossEntropy(), features=work.features, labels=work.labels
    )
    assert fits is None
    return FusedExecutor(chain, objective=CrossEntropy())


def difference(one: TrainedBlock, other: TrainedBlock) -> float:
    """Return the largest difference of any delta, loss, lane or client state."""
    found = [
        (one.deltas_KP - other.deltas_KP).abs().max().item(),
        float(np.abs(one.losses_K - other.losses_K).max()),
    ]
    for own, others in ((one.client_state, other.client_state), (one.lanes, other.lanes)):
        assert own.keys() == others.keys()
        found += [(own[name] - others[name]).abs().max().item() for name in own]
    return max(found)


@dataclass(frozen=True, kw_only=True)
class HalfAffine(LocalSgd):
    """SGD whose steps are not affine in the middle of a round."""

    takes_flat: ClassVar[bool] = True

    def affine(self, moment: Moment) -> Affine | None:
        is_early = bool((moment.epochs_K < 1).any())
        return None if is_early is (moment.step % 2 == 0) else super().affine(moment)

    def step(
        self, x: Tensors, grads: Tensors, memory: Memory, *, broadcast: Memory, moment: Moment
    ) -> None:
        super().step(x, grads, memory, broadcast=broadcast, moment=moment)


@dataclass(frozen=True, kw_only=True)
class Ahead(LocalUpdateWrapper):
    """Steps by the gradient at the point that a plain step would reach, and the full one."""

    asks_gradients: ClassVar[bool] = True

    @property
    def memory(self) -> Mapping[str, MemorySpec]:
        return {**self.inner.memory, "full": MemorySpec(over=Over.TRAINABLE, is_kept=True)}

    def begin(self, x: Tensors, memory: Memory, *, broadcast: Memory, moment: Moment) -> None:
        losses_K, grads = moment.gradient_at(x)
        for full, grad in zip(memory["full"], grads, strict=True):
            full.copy_(unsqueeze_like(losses_K, grad) * grad)
        self.inner.begin(x, memory, broadcast=broadcast, moment=moment)

    def step(
        self, x: Tensors, grads: Tensors, memory: Memory, *, broadcast: Memory, moment: Moment
    ) -> None:
        losses_K, ahead = moment.gradient_at(add_scaled(x, grads, factor=-0.1))
        scaled = [unsqueeze_like(losses_K, each) * each for each in ahead]
        directions = add_scaled(scaled, list(memory["full"]), factor=0.5)
        self.inner.step(x, directions, memory, broadcast=broadcast, moment=moment)


class FlatAhead(Ahead):
    """With all parameters of a client in one tensor."""

    takes_flat: ClassVar[bool] = True


def add_further_gradients(inner: LocalSgd) -> Mapping[str, LocalUpdate]:
    """Return updates that ask for gradients elsewhere: once, twice, and only at the end."""
    return {
        "ahead": Ahead(inner=inner),
        "ahead, flat": FlatAhead(inner=inner),
        "ahead twice": MetaGradient(inner=inner, adaptation_rate=0.1, hessian_step=0.01),
        # Its steps are taken in place, and it asks after the last one.
        "fair": FairUpdate(inner=inner, fairness=1.0, step_size=1.0, normalizer_bound=1e9),
    }


CONTROLLED = ControlVariates(inner=replace(PLAIN, epochs=2), control_bound=None)
RULES: dict[str, LocalUpdate] = {
    "plain": PLAIN,
    "epochs": replace(PLAIN, epochs=3),
    "in order": replace(PLAIN, shuffle=False, epochs=2),
    "all at once": replace(PLAIN, batch_size=None, epochs=2),
    "weight decay": replace(PLAIN, weight_decay=0.3),
    "momentum": replace(PLAIN, momentum=0.7, epochs=2),
    "proximal": Proximal(inner=replace(PLAIN, epochs=2), proximal=0.5),
    "control variates": CONTROLLED,
    "control variates, bounded": replace(CONTROLLED, control_bound=0.3),
    "control variates, pulled": Proximal(inner=CONTROLLED, proximal=0.5),
    "kept velocity": replace(PLAIN, momentum=0.7, keep_momentum=True),
    "some steps affine": HalfAffine(epochs=3, batch_size=4, learning_rate=0.1),
    "some steps affine, momentum": HalfAffine(
        epochs=3, batch_size=4, learning_rate=0.1, momentum=0.7
    ),
    "drift, momentum": DynamicRegularizer(
        inner=replace(PLAIN, momentum=0.7, weight_decay=0.1, epochs=2), alpha=0.3
    ),
    "without a rate": ScheduledRate(
        inner=replace(PLAIN, momentum=0.7, weight_decay=0.1, keep_momentum=True), cosine_rounds=2
    ),
    "everything": Proximal(
        inner=replace(PLAIN, momentum=0.5, weight_decay=0.1, keep_momentum=True, epochs=2),
        proximal=0.2,
    ),
    **add_further_gradients(replace(PLAIN, epochs=2, momentum=0.7)),
    # Some clients are done with their first epoch before others, which come after them.
    "ahead, few steps": Ahead(inner=replace(PLAIN, epochs=2, max_steps=3)),
    "ahead, in turn": HeadThenBody(
        inner=Ahead(inner=replace(PLAIN, epochs=2)), head="*.bias", head_epochs=1
    ),
}


#: Every rule with two models, one of them with all that a layer may have; and every model with two
#: rules, one of them with all that a step may do.
PAIRS = [
    (model, rule)
    for model in MODELS
    for rule in RULES
    if model in {"mlp", "odd cnn"} or rule in {"plain", "everything"}
]


@pytest.mark.parametrize(("model", "rule"), PAIRS)
def test_a_block_equals_the_reference_to_float32_rounding(model: str, rule: str) -> None:
    """With ragged clients and a partial last batch, for every model and update rule."""
    work = work_for(model, RULES[rule], num_examples=[11, 8, 6, 4, 1], dtype=torch.float32)
    trained = fused_executor(model, work).train(work)
    assert difference(trained, by_reference(model, work)) <= 1e-6


PULLED = Proximal(inner=replace(PLAIN, epochs=3, weight_decay=0.1), proximal=0.5)


@pytest.mark.parametrize(
    "inner", [PULLED, replace(PLAIN, epochs=3, momentum=0.5)], ids=["affine", "momentum"]
)
@pytest.mark.parametrize("head_epochs", [0, 1])
@pytest.mark.parametrize(
    ("model", "head"),
    [
        ("mlp", "2.*"),
        ("mlp", "0.*"),
        ("mlp", "0.weight 2.bias"),
        ("logistic regression", "bias"),
        ("pooled cnn", "0.bias 3.*"),
        ("written by hand", "conv.* head.weight"),
    ],
)
def test_parts_that_train_in_turn_equal_the_reference(
    model: str, head: str, head_epochs: int, inner: LocalUpdate
) -> None:
    """Clients change parts at different steps."""
    local = HeadThenBody(inner=inner, head=head, head_epochs=head_epochs)
    work = work_for(model, local, num_examples=[11, 8, 6, 4, 1], dtype=torch.float32)
    trained = fused_executor(model, work).train(work)
    assert difference(trained, by_reference(model, work)) <= 1e-6


@dataclass(frozen=True, kw_only=True)
class NeverSteps(LocalSgd):
    """SGD whose affine steps have to be enough."""

    def affine(self, moment: Moment) -> Affine | None:
        return super().affine(moment)

    def step(
        self, x: Tensors, grads: Tensors, memory: Memory, *, broadcast: Memory, moment: Moment
    ) -> None:
        raise AssertionError


@pytest.mark.parametrize("momentum", [0.0, 0.7])
def test_parts_that_train_in_turn_take_affine_steps(momentum: float) -> None:
    """So no gradient is stored, and none is computed of what does not train."""
    sgd = NeverSteps(epochs=2, batch_size=4, learning_rate=0.1, momentum=momentum)
    local = HeadThenBody(inner=sgd, head="2.*", head_epochs=1)
    work = work_for("mlp", local, num_examples=[9, 5], dtype=torch.float32)
    assert fused_executor("mlp", work).train(work).deltas_KP.ne(0).all()


def test_the_loss_of_a_batch_is_unknown_before_an_affine_step() -> None:
    """The fused executor takes the step together with the gradient."""

    @dataclass(frozen=True, kw_only=True)
    class AsksLoss(NeverSteps):
        def affine(self, moment: Moment) -> Affine | None:
            return None if moment.losses_K.isnan().any() else super().affine(moment)

        step = LocalSgd.step

    local = AsksLoss(epochs=1, batch_size=4, learning_rate=0.1)
    work = work_for("mlp", local, num_examples=[9, 5], dtype=torch.float32)
    with pytest.raises(ValueError, match="not known in affine; read it in step"):
        fused_executor("mlp", work).train(work)


def test_memory_is_reused_between_updates_with_and_without_velocities() -> None:
    """Steps that are not affine need the memory of the velocities for their gradients."""
    sgd = replace(PLAIN, momentum=0.7, keep_momentum=True)
    half = HalfAffine(**{each.name: getattr(sgd, each.name) for each in fields(sgd)})
    works = [
        work_for("mlp", each, num_examples=[9, 5], dtype=torch.float32) for each in (sgd, half)
    ]
    fused = fused_executor("mlp", works[0])
    for work in (*works, *works):
        assert difference(fused.train(work), by_reference("mlp", work)) <= 1e-6


@settings(max_examples=40)
@given(
    model=st.sampled_from(list(MODELS)),
    local=st.builds(
        LocalSgd,
        epochs=st.integers(1, 3),
        batch_size=st.none() | st.integers(1, 7),
        learning_rate=st.floats(0.01, 0.5),
        momentum=st.sampled_from([0.0, 0.5]),
        weight_decay=st.sampled_from([0.0, 0.1]),
        shuffle=st.booleans(),
    ),
    around=st.sampled_from(["proximal", *add_further_gradients(PLAIN)]) | st.none(),
    num_examples=st.lists(st.integers(1, 15), min_size=1, max_size=6),
    seed=st.integers(0, 99),
)
def test_any_ragged_block_equals_the_reference_in_float64(
    model: str, local: LocalSgd, around: str | None, num_examples: list[int], seed: int
) -> None:
    """In float64, where rounding is so small that any other difference would show."""
    # Small steps: these updates multiply gradients, and what diverges also multiplies rounding.
    small = replace(local, learning_rate=0.1 * local.learning_rate)
    wrapped = {**add_further_gradients(small), "proximal": Proximal(inner=local, proximal=0.4)}
    update = local if around is None else wrapped[around]
    work = work_for(model, update, num_examples=num_examples, dtype=torch.float64, seed=seed)
    trained = fused_executor(model, work).train(work)
    assert difference(trained, by_reference(model, work)) <= 1e-10


def changed(rule: LocalUpdate, wrong: Callable[[LocalSgd], LocalSgd]) -> LocalUpdate:
    """Replace the SGD inside a rule."""
    if isinstance(rule, LocalUpdateWrapper):
        return replace(rule, inner=changed(rule.inner, wrong))
    assert isinstance(rule, LocalSgd)
    return wrong(rule)


@pytest.mark.parametrize("rule", ["plain", "everything"])
@pytest.mark.parametrize(
    "wrong",
    [
        lambda rule: replace(rule, learning_rate=0.1001),
        lambda rule: replace(rule, weight_decay=rule.weight_decay + 0.001),
        lambda rule: replace(rule, epochs=rule.epochs + 1),
        lambda rule: replace(rule, shuffle=False),
    ],
)
def test_the_comparison_would_notice_a_wrong_update(
    rule: str, wrong: Callable[[LocalSgd], LocalSgd]
) -> None:
    """The control: a learning rate wrong by a thousandth is far outside the tolerance."""
    known = RULES[rule]
    right = work_for("mlp", known, num_examples=[9, 5], dtype=torch.float32)
    work = work_for("mlp", changed(known, wrong), num_examples=[9, 5], dtype=torch.float32)
    trained = fused_executor("mlp", work).train(work)
    assert difference(trained, by_reference("mlp", right)) > 1e-5


@pytest.mark.parametrize("what", ["broadcast", "client_state"])
def test_the_comparison_would_notice_another_control(what: str) -> None:
    """A control of the server or of a client that is wrong by a hundredth."""
    work = work_for("mlp", CONTROLLED, num_examples=[9, 5], dtype=torch.float32)
    wrong = {what: {"control": getattr(work, what)["control"] * 1.01}}
    other = replace(
        work,
        broadcast=wrong.get("broadcast", work.broadcast),
        client_state=wrong.get("client_state", work.client_state),
    )
    trained = fused_executor("mlp", work).train(other)
    assert difference(trained, by_reference("mlp", work)) > 1e-5


@pytest.mark.parametrize("model", ["mlp", "pooled cnn"])
def test_a_block_leaves_nothing_behind_for_the_next(model: str) -> None:
    """Blocks of other sizes and rules in between, even one that diverges, change nothing."""
    work = work_for(model, PLAIN, num_examples=[9, 5, 2], dtype=torch.float32)
    executor = fused_executor(model, work)
    first = executor.train(work).deltas_KP.clone()
    for local, sizes in (
        (RULES["everything"], [3]),
        (Ahead(inner=replace(PLAIN, learning_rate=1e30, epochs=2)), [15, 12]),
        (replace(PLAIN, learning_rate=1e30, epochs=3, momentum=0.9), [15, 15, 12, 9]),
        (replace(PLAIN, learning_rate=1e30, epochs=3), [15, 15, 12, 9]),
        (RULES["all at once"], [15, 14, 13, 12]),
        # Last, since its memory is that of the block below.
        (replace(PLAIN, learning_rate=1e30, epochs=3, momentum=0.9), [15, 15, 12, 9]),
    ):
        executor.train(work_for(model, local, num_examples=sizes, dtype=torch.float32))
    momentum = work_for(model, RULES["momentum"], num_examples=[7, 3], dtype=torch.float32)
    assert difference(executor.train(momentum), by_reference(model, momentum)) <= 1e-6
    assert torch.equal(executor.train(work).deltas_KP, first)


@dataclass(frozen=True, kw_only=True)
class Counting(LocalSgd):
    """SGD that reports its number of steps, and keeps the sum as client state."""

    @property
    def lanes(self) -> Sequence[LaneSpec]:
        return (LaneSpec(name="steps", over=1, weighted=False, bound=None),)

    @property
    def memory(self) -> Mapping[str, MemorySpec]:
        return {"total": MemorySpec(over=1, is_kept=True)}

    def report(
        self, x: Tensors, memory: Memory, *, broadcast: Memory, moment: Moment
    ) -> Mapping[str, Tensors]:
        memory["total"][0].add_(moment.num_steps_K[:, None])
        return {"steps": [moment.num_steps_K[:, None]]}


def test_what_plain_sgd_reports_and_keeps_is_that_of_the_reference() -> None:
    """An update with an affine step may have other methods as well."""
    local = Counting(epochs=2, batch_size=4, learning_rate=0.1)
    work = work_for("mlp", local, num_examples=[9, 5], dtype=torch.float32)
    work = replace(work, client_state={"total": torch.tensor([[10.0], [20.0]])})
    trained, expected = fused_executor("mlp", work).train(work), by_reference("mlp", work)
    assert difference(trained, expected) <= 1e-6
    assert trained.client_state["total"].tolist() == [[16.0], [24.0]]
    assert trained.lanes["steps"].tolist() == expected.lanes["steps"].tolist() == [[6.0], [4.0]]


@dataclass(frozen=True, kw_only=True)
class Sending(LocalSgd):
    """SGD that reports the whole local model, as the tensors themselves."""

    takes_flat: ClassVar[bool] = True

    @property
    def lanes(self) -> Sequence[LaneSpec]:
        return (LaneSpec(name="whole", over=Over.TRAINABLE, weighted=False, bound=None),)

    def report(
        self, x: Tensors, memory: Memory, *, broadcast: Memory, moment: Moment
    ) -> Mapping[str, Tensors]:
        return {"whole": x}


def test_a_report_may_return_the_local_model_itself() -> None:
    """Though the delta is computed in its memory."""
    local = Sending(epochs=2, batch_size=4, learning_rate=0.1)
    work = work_for("mlp", local, num_examples=[9, 5], dtype=torch.float32)
    trained = fused_executor("mlp", work).train(work)
    assert difference(trained, by_reference("mlp", work)) <= 1e-6
    assert torch.equal(trained.lanes["whole"] - work.params.vector, trained.deltas_KP)


def test_the_global_model_and_kept_velocities_are_not_written_to() -> None:
    """They belong to the caller."""
    work = work_for("mlp", RULES["everything"], num_examples=[9, 5], dtype=torch.float32)
    before = work.params.vector.clone(), work.client_state["velocity"].clone()
    fused_executor("mlp", work).train(work)
    assert torch.equal(work.params.vector, before[0])
    assert torch.equal(work.client_state["velocity"], before[1])


def test_weights_may_decay_to_nothing_in_one_step() -> None:
    """If the learning rate times the weight decay is 1, a step keeps nothing of the weights.

    Without ReLU, because a weight of 0 or of a rounding error would be on different sides of it.
    """
    local = replace(PLAIN, weight_decay=10.0)
    work = work_for("logistic regression", local, num_examples=[11, 4], dtype=torch.float32)
    trained = fused_executor("logistic regression", work).train(work)
    assert difference(trained, by_reference("logistic regression", work)) <= 1e-6


class Branching(nn.Module):
    """Adds a layer's input to its output."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return x + F.relu(self.inner(x))


class Repeating(Branching):
    """Uses a layer twice."""

    def forward(self, x: Tensor) -> Tensor:
        outputs: Tensor = self.inner(self.inner(x))
        return outputs


class Skipping(Branching):
    """Discards a layer's output."""

    def forward(self, x: Tensor) -> Tensor:
        first: Tensor = torch.relu(self.inner(x))
        torch.tanh(first)
        return first


class Deciding(Branching):
    """Branches on the values."""

    def forward(self, x: Tensor) -> Tensor:
        outputs: Tensor = self.inner(x) if x.sum() > 0 else x
        return outputs


class Loose(nn.Module):
    """Has a parameter outside of a layer."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(4))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.scale


class Sparing(Branching):
    """Does not use one of its layers."""

    def __init__(self) -> None:
        super().__init__()
        self.spare = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        outputs: Tensor = self.inner(x)
        return outputs


def frozen() -> nn.Module:
    first = nn.Linear(4, 4)
    first.weight.requires_grad_(False)
    return nn.Sequential(first, nn.Linear(4, 2))


def build_tied() -> nn.Module:
    first, second = nn.Linear(4, 4), nn.Linear(4, 4)
    second.weight = first.weight
    return nn.Sequential(first, second)


def build_hooked() -> nn.Module:
    model = nn.Linear(4, 2)
    model.register_forward_hook(lambda *_: None)
    return model


REFUSED: dict[str, tuple[Callable[[], nn.Module], str]] = {
    "normalization": (lambda: nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4)), "statistic"),
    "layer norm": (lambda: nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4)), r"1 \(LayerNorm\)"),
    "softmax": (lambda: nn.Sequential(nn.Linear(4, 4), nn.Softmax(1)), r"layer 1 \(Softmax\)"),
    "dropout": (lambda: nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.5)), "random masks"),
    "groups": (lambda: nn.Conv2d(4, 4, 3, groups=2), "2 groups"),
    "circular padding": (lambda: nn.Conv2d(4, 4, 3, padding_mode="circular"), "circular"),
    "lopsided padding": (lambda: nn.Conv2d(4, 4, 2, padding="same"), "one side"),
    "early flatten": (lambda: nn.Sequential(nn.Linear(4, 4), nn.Flatten(0)), "flatten"),
    "rising leak": (lambda: nn.Sequential(nn.Linear(4, 4), nn.LeakyReLU(-1.0)), "slope"),
    "frozen": (frozen, "0.weight is frozen"),
    "tied": (build_tied, "share one parameter"),
    "hooked": (build_hooked, "hook"),
    "branching": (Branching, "add"),
    "repeating": (Repeating, "inner.weight is used 2 times"),
    "skipping": (Skipping, "more than the output"),
    "deciding": (Deciding, "cannot be traced"),
    "sparing": (Sparing, "spare.weight is used 0 times"),
    "loose": (Loose, "scale is used outside"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_a_model_that_is_no_chain_is_refused_with_the_reason(case: str) -> None:
    """The reason names something that the user can find in the model."""
    make, reason = REFUSED[case]
    model = make()
    answer = as_chain(model, Layout.of(model))
    assert isinstance(answer, NotAChain)
    assert re.search(reason, answer.reason), answer.reason


@pytest.mark.parametrize("layer", [nn.Dropout, nn.Dropout1d])
def test_the_dropout_layer_of_a_resident_model_is_named(layer: type[nn.Dropout]) -> None:
    """With the user's type, its place and a fix; control: at rate 0 the model is a chain."""

    def answer(rate: float) -> Chain | NotAChain:
        resident = ResidentModel(
            lambda: nn.Sequential(nn.Linear(4, 4), nn.Sequential(nn.ReLU(), layer(rate))),
            CrossEntropy(),
            device=CPU,
            precision=Precision.FLOAT32,
        )
        return as_chain(resident.module, resident.layout)

    refused = answer(0.5)
    assert isinstance(refused, NotAChain)
    assert f"layer 1.1 ({layer.__name__}) draws random masks" in refused.reason
    assert "at rate 0" in refused.reason
    assert isinstance(answer(0.0), Chain)


def test_examples_that_the_chain_does_not_take_are_named() -> None:
    """The same chain fits some examples, objectives and dtypes, but not others."""
    chain = chain_of(mlp())
    features, labels = torch.zeros(3, 12), torch.zeros(3, dtype=torch.int64)

    def answer(features: Tensor, labels: Tensor) -> str:
        return (
            describe_misfit(chain, objective=CrossEntropy(), features=features, labels=labels) or ""
        )

    assert not answer(features, labels)
    assert "(3, 4)" in answer(features.view(3, 3, 4), labels)
    assert "torch.bool" in answer((features > 0), labels)
    assert "[3, 1]" in answer(features, labels[:, None])
    assert "MeanSquaredError" in str(
        describe_misfit(chain, objective=MeanSquaredError(), features=features, labels=labels)
    )
    images = chain_of(nn.Conv2d(1, 2, 3))
    assert "not one logit per class" in str(
        describe_misfit(
            images, objective=CrossEntropy(), features=torch.zeros(3, 1, 5, 5), labels=labels
        )
    )
    assert "7 features" in str(
        describe_misfit(
            Chain((Layer(nn.Flatten(), {}, 7), *chain.layers), chain.layout),
            objective=CrossEntropy(),
            features=features,
            labels=labels,
        )
    )


def test_examples_of_a_wrong_shape_do_not_train() -> None:
    """The executor raises the reason if it was not checked before."""
    work = work_for("mlp", PLAIN, num_examples=[3], dtype=torch.float32)
    wrong = replace(work, features=require_single_input(work.features)[:, :11])
    with pytest.raises(ValueError, match=r"does not take examples of shape \(11,\)"):
        FusedExecutor(chain_of(mlp()), objective=CrossEntropy()).train(wrong)


@pytest.mark.parametrize(
    ("model", "smallest", "largest"),
    [
        (lambda: nn.Sequential(nn.Linear(64, 200), nn.Linear(200, 10)), 25, 200),
        (lambda: nn.Sequential(nn.Linear(784, 200), nn.Linear(200, 10)), 16, 32),
        (lambda: nn.Sequential(nn.Conv2d(16, 32, 5), nn.Linear(1568, 128)), 3, 6),
        (lambda: nn.Sequential(nn.Conv2d(32, 64, 3), nn.Linear(12544, 128)), 2, 2),
    ],
)
def test_blocks_are_as_large_as_the_cache_allows(
    model: Callable[[], nn.Module], smallest: int, largest: int
) -> None:
    """As measured: many small models, few large ones, and at least two."""
    assert smallest <= choose_block_size(Layout.of(model())) <= largest
