"""The stacked executor equals the sequential one, or reports in advance that it cannot."""

import re
from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.fx.experimental.proxy_tensor import make_fx
from torch.nn import functional as F

from fedlearn.algorithms.local import LocalSgd, LocalUpdate
from fedlearn.algorithms.noised_gradients import NoisedGradients
from fedlearn.algorithms.objectives import CrossEntropy, CustomLoss, MeanSquaredError, Objective
from fedlearn.algorithms.proximal import Proximal
from fedlearn.algorithms.rate_schedules import ScheduledRate
from fedlearn.core.params import Layout, Params
from fedlearn.core.randomness import Seed
from fedlearn.errors import EngineError
from fedlearn.simulation.executors import stacked, stacked_gradient, stacked_trace
from fedlearn.simulation.executors.base import TrainedBlock, Work
from fedlearn.simulation.executors.sequential import SequentialExecutor
from fedlearn.simulation.executors.stacked import StackedExecutor, explain_not_compiled
from fedlearn.simulation.executors.stacked_gradient import Batch, BlockGradient, Shared, Stack
from fedlearn.simulation.executors.stacked_trace import TracedSteps
from fedlearn.simulation.executors.trial import trial_of
from fedlearn.simulation.population import ClientRows
from fedlearn.simulation.schedule import schedule
from fedlearn.training.resident import Precision, ResidentModel

CPU = torch.device("cpu")
MakeModel = Callable[[], nn.Module]
PLAIN = LocalSgd(epochs=1, batch_size=4, learning_rate=0.1)
RAGGED = (11, 8, 7, 3, 1)
#: No client has a last batch of one example, which BatchNorm refuses, stacked or not.
RAGGED_WITHOUT_ONES = (11, 10, 8, 7, 3)


def to_params(make_model: MakeModel) -> Params:
    torch.manual_seed(0)
    return Params.of(make_model())


def work_of(
    params: Params,
    *,
    local: LocalUpdate = PLAIN,
    sizes: tuple[int, ...] = RAGGED,
    shape: tuple[int, ...] = (6,),
    features: Tensor | None = None,
    labels: Tensor | None = None,
) -> Work:
    ordered = np.array(sorted(sizes, reverse=True))
    offsets = np.concatenate([[0], np.cumsum(ordered)])
    generator = torch.Generator().manual_seed(1)
    if features is None:
        features = torch.randn(40, *shape, generator=generator, dtype=params.layout.dtype)
    if labels is None:
        labels = torch.randint(0, 3, (len(features),), generator=generator)
    rows = np.arange(offsets[-1]) % len(features)
    client_ids = np.arange(len(sizes)) * 7 + 3
    batches = schedule(
        local.work,
        ClientRows(features, labels, rows, offsets),
        client_ids,
        round_num=2,
        seed=Seed(5),
        dtype=params.layout.dtype,
        device=CPU,
    )
    return Work(
        params=params,
        local=local,
        client_ids=client_ids,
        features=features,
        labels=labels,
        rows_K=np.split(rows, offsets[1:-1]),
        schedule=batches,
        round_num=2,
        seed=Seed(5),
        broadcast={},
        client_state={},
    )


def reference(make_model: MakeModel, work: Work, objective: Objective) -> TrainedBlock:
    model = ResidentModel(make_model, objective, device=CPU, precision=Precision.FLOAT32)
    return SequentialExecutor(model).train(work)


def executor(
    make_model: MakeModel, objective: Objective, *, is_compiled: bool = False
) -> StackedExecutor:
    gradient = BlockGradient(make_model, objective, device=CPU, precision=Precision.FLOAT32)
    return StackedExecutor(gradient, is_compiled=is_compiled)


def error_of(
    make_model: MakeModel,
    work: Work,
    *,
    objective: Objective | None = None,
    is_compiled: bool = False,
) -> float:
    """Return the largest difference between the stacked and the sequential executor."""
    objective = objective or CrossEntropy()
    expected = reference(make_model, work, objective)
    found = executor(make_model, objective, is_compiled=is_compiled).train(work)
    assert expected.deltas_KP.abs().amax(1).min() > 0, "every client moves"
    return distance(expected, found)


def distance(expected: TrainedBlock, found: TrainedBlock) -> float:
    assert found.deltas_KP.shape == expected.deltas_KP.shape
    errors = [float((found.deltas_KP - expected.deltas_KP).abs().max())]
    errors.append(float(np.abs(found.losses_K - expected.losses_K).max()))
    assert found.client_state.keys() == expected.client_state.keys()
    errors += [
        float((found.client_state[n] - expected.client_state[n]).abs().max())
        for n in expected.client_state
    ]
    return max(errors)


def reason(make_model: MakeModel, work: Work, objective: Objective | None = None) -> str | None:
    objective = objective or CrossEntropy()
    trial = trial_of(make_model, objective, work, precision=Precision.FLOAT32)
    if isinstance(trial, str):
        return trial
    return trial.objection(lambda: executor(make_model, objective))


def mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 3))


def mlp_with_dropout() -> nn.Module:
    return nn.Sequential(
        nn.Linear(6, 8),
        nn.ReLU(),
        nn.Dropout(0.3),
        nn.Linear(8, 8),
        nn.Dropout(0.5),
        nn.Linear(8, 3),
    )


def small_net_with_dropout() -> nn.Module:
    """Only one dropout layer, since each one takes the compiler many seconds."""
    return nn.Sequential(nn.Linear(6, 8), nn.Dropout(0.3), nn.Linear(8, 3))


def batch_norm_net() -> nn.Module:
    """In float64, because normalizing two examples magnifies the rounding of float32."""
    return nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Tanh(), nn.Linear(8, 3)).double()


def conv_net() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(1, 4, 3, padding=1),
        nn.GroupNorm(2, 4),
        nn.ReLU(inplace=True),
        nn.MaxPool2d(2),
        nn.Dropout2d(0.25),
        nn.Flatten(),
        nn.LayerNorm(36),
        nn.Linear(36, 3),
    )


class Tokens(nn.Module):
    """An embedding and a recurrent layer."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(10, 5)
        self.gru = nn.GRU(5, 6, batch_first=True)
        self.head = nn.Linear(6, 3)

    def forward(self, tokens: Tensor) -> Tensor:
        states, _ = self.gru(self.embedding(tokens))
        logits: Tensor = self.head(states[:, -1])
        return logits


@settings(max_examples=12)
@given(
    sizes=st.lists(st.integers(1, 13), min_size=1, max_size=6),
    epochs=st.integers(1, 2),
    batch_size=st.sampled_from([None, 1, 4, 20]),
    momentum=st.sampled_from([0.0, 0.9]),
    weight_decay=st.sampled_from([0.0, 0.01]),
    proximal=st.sampled_from([0.0, 0.5]),
    shuffle=st.booleans(),
)
def test_every_update_rule_on_ragged_clients_equals_the_reference(
    *,
    sizes: list[int],
    epochs: int,
    batch_size: int | None,
    momentum: float,
    weight_decay: float,
    proximal: float,
    shuffle: bool,
) -> None:
    """Sizes, epochs and all terms of the update rule, in any combination.

    In float64, since some combinations have rounding errors near 1e-6 in float32.
    """

    def make() -> nn.Module:
        return mlp().double()

    local = LocalSgd(
        epochs=epochs,
        batch_size=batch_size,
        learning_rate=0.1,
        momentum=momentum,
        weight_decay=weight_decay,
        shuffle=shuffle,
    )
    pulled = Proximal(inner=local, proximal=proximal)
    work = work_of(to_params(make), local=pulled, sizes=tuple(sizes))
    assert error_of(make, work) < 1e-12


@pytest.mark.slow
def test_an_executor_is_reused_for_other_blocks_and_rules() -> None:
    """Blocks of growing and shrinking size, with and without momentum, do not affect each other."""
    stack, params = executor(mlp, CrossEntropy()), to_params(mlp)
    for sizes, momentum in (((9, 4), 0.0), (RAGGED, 0.9), ((5,), 0.0), ((7, 7, 2), 0.5)):
        work = work_of(params, local=replace(PLAIN, momentum=momentum), sizes=sizes)
        found = stack.train(work)
        assert distance(reference(mlp, work, CrossEntropy()), found) < 1e-6


@pytest.mark.slow
def test_kept_velocities_go_in_and_come_out() -> None:
    """A client's velocity continues, and is returned for its next round."""
    params = to_params(mlp)
    local = replace(PLAIN, momentum=0.9, keep_momentum=True)
    velocity_KQ = torch.randn(len(RAGGED), params.layout.num_trainable) * 0.01
    work = replace(work_of(params, local=local), client_state={"velocity": velocity_KQ})
    assert error_of(mlp, work) < 1e-6
    forgotten = replace(work, client_state={"velocity": torch.zeros_like(velocity_KQ)})
    expected = reference(mlp, work, CrossEntropy())
    assert distance(expected, executor(mlp, CrossEntropy()).train(forgotten)) > 1e-4
    # In a round without a rate, the velocity still accumulates.
    still = ScheduledRate(inner=replace(local, weight_decay=0.1), cosine_rounds=2)
    work = replace(work, local=still)
    found = executor(mlp, CrossEntropy()).train(work)
    assert distance(reference(mlp, work, CrossEntropy()), found) < 1e-6


@pytest.mark.slow
def test_dropout_drops_the_same_units() -> None:
    """Masks are keyed by client and step, not by how clients are stacked."""
    work = work_of(to_params(mlp_with_dropout), local=replace(PLAIN, epochs=2))
    assert error_of(mlp_with_dropout, work) < 1e-6
    expected = reference(mlp_with_dropout, work, CrossEntropy())
    other_round = executor(mlp_with_dropout, CrossEntropy()).train(replace(work, round_num=3))
    assert distance(expected, other_round) > 1e-3, "the control: other masks are noticed"


@pytest.mark.slow
def test_batch_norm_with_ragged_batches_is_exact() -> None:
    """Clients with batches of the same size step together, so that no padding is normalized."""
    work = work_of(
        to_params(batch_norm_net),
        sizes=RAGGED_WITHOUT_ONES,
        local=replace(PLAIN, epochs=2, momentum=0.5),
    )
    assert error_of(batch_norm_net, work) < 1e-12


@pytest.mark.parametrize("rows", [1, 8], ids=["one row", "rows that are alike"])
def test_batch_norm_is_exact_after_a_first_block_that_tells_nothing_of_it(rows: int) -> None:
    """If a dataset is read per block, a client's few rows may be the only ones at first."""
    params, stacked = to_params(batch_norm_net), executor(batch_norm_net, CrossEntropy())
    alike = torch.ones(rows, 6, dtype=params.layout.dtype)
    try:
        stacked.train(work_of(params, sizes=(rows,), features=alike))
    except ValueError:
        assert rows == 1, "BatchNorm has no variance of one example"
    work = work_of(params, sizes=RAGGED_WITHOUT_ONES)
    assert distance(reference(batch_norm_net, work, CrossEntropy()), stacked.train(work)) < 1e-5


@pytest.mark.slow
def test_padding_would_falsify_batch_norm(monkeypatch: pytest.MonkeyPatch) -> None:
    """The control: without the test for models that mix examples, the result is wrong."""
    work = work_of(to_params(batch_norm_net), sizes=RAGGED_WITHOUT_ONES)
    monkeypatch.setattr(stacked_gradient, "_close", lambda *_: True)
    assert error_of(batch_norm_net, work) > 1e-3


def test_batch_norm_with_a_cumulative_average_counts_batches_per_client() -> None:
    """Integer buffers advance step by step, equally for all clients."""

    def make() -> nn.Module:
        return nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8, momentum=None), nn.Linear(8, 3))

    params = to_params(make)
    counted = replace(params, constants={"1.num_batches_tracked": torch.tensor(3)})
    assert error_of(make, work_of(counted, sizes=RAGGED_WITHOUT_ONES)) < 1e-6


def test_a_dropout_that_is_not_batch_first_is_exact() -> None:
    """Its masks depend on the batch size, so it counts as mixing examples."""

    class TimeFirst(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner, self.head = nn.Linear(2, 5), nn.Linear(5, 3)
            self.dropout = nn.Dropout(0.5)

        def forward(self, inputs: Tensor) -> Tensor:
            states = self.inner(inputs.view(-1, 3, 2).transpose(0, 1))
            logits: Tensor = self.head(self.dropout(states).mean(0))
            return logits

    assert error_of(TimeFirst, work_of(to_params(TimeFirst))) < 1e-6


@pytest.mark.slow
def test_convolutions_group_norm_and_layer_norm_equal_the_reference() -> None:
    """Images, per-example normalization, in-place activation, channel-wise dropout."""
    assert error_of(conv_net, work_of(to_params(conv_net), shape=(1, 6, 6))) < 1e-6


@pytest.mark.slow
def test_embedding_and_gru_equal_the_reference() -> None:
    """Integer features."""
    tokens = torch.randint(0, 10, (40, 4), generator=torch.Generator().manual_seed(3))
    work = work_of(to_params(Tokens), features=tokens)
    assert error_of(Tokens, work) < 1e-6
    assert reason(Tokens, work) is None


@pytest.mark.slow
def test_frozen_and_unused_parameters_have_no_delta() -> None:
    """Only parameters that require a gradient, and get one, are trained."""

    class Partly(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body, self.head, self.unused = nn.Linear(6, 8), nn.Linear(8, 3), nn.Linear(2, 2)
            self.body.requires_grad_(requires_grad=False)

        def forward(self, inputs: Tensor) -> Tensor:
            logits: Tensor = self.head(self.body(inputs).relu())
            return logits

    params = to_params(Partly)
    work = work_of(params, local=replace(PLAIN, momentum=0.9, weight_decay=0.1))
    assert error_of(Partly, replace(work, local=replace(PLAIN, weight_decay=0.1))) < 1e-6
    assert error_of(Partly, work) < 1e-6
    stack = executor(Partly, CrossEntropy())
    stack.train(work).deltas_KP.add_(1.0)  # as a user's transform may do
    deltas = params.layout.views(stack.train(work).deltas_KP)
    assert not deltas.keys() & {"body.weight", "body.bias"}
    for name in ("unused.weight", "unused.bias"):
        assert not deltas[name].any()


def test_a_parameter_decays_only_in_the_steps_that_reach_it() -> None:
    """That may depend on the size of a batch: here the last one is smaller."""

    class Centered(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body, self.large = nn.Linear(6, 3), nn.Linear(6, 3)

        def forward(self, inputs: Tensor) -> Tensor:
            logits: Tensor = self.body(inputs)
            return logits + self.large(inputs) if len(inputs) > 3 else logits

    local = replace(PLAIN, epochs=2, weight_decay=0.5, momentum=0.5)
    assert error_of(Centered, work_of(to_params(Centered), local=local)) < 1e-6


@pytest.mark.slow
def test_float64_equals_the_reference_to_its_rounding() -> None:
    """The remaining difference in float32 is rounding."""

    def make() -> nn.Module:
        return mlp_with_dropout().double()

    rule = replace(PLAIN, epochs=3, momentum=0.9, weight_decay=0.01)
    local = Proximal(inner=rule, proximal=0.1)
    assert error_of(make, work_of(to_params(make), local=local)) < 1e-12


class Product(nn.Module):
    """Two weights that are multiplied: each is a factor of the other's gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Parameter(torch.randn(6, 5))
        self.second = nn.Parameter(torch.randn(5, 3))

    def forward(self, inputs: Tensor) -> Tensor:
        return inputs @ (self.first @ self.second)


@pytest.mark.slow
def test_weights_that_multiply_each_other_step_at_once() -> None:
    """The gradient of one weight does not see the step of the other."""
    assert error_of(Product, work_of(to_params(Product))) < 1e-6


def test_a_factor_that_is_a_weight_would_have_stepped(monkeypatch: pytest.MonkeyPatch) -> None:
    """The control: a factor that is itself a weight changes before the product is computed."""
    monkeypatch.setattr(stacked_trace, "_owner", lambda node: node)
    assert error_of(Product, work_of(to_params(Product))) > 1e-4


class OnSequences(nn.Module):
    """A linear layer applied to each of three parts of an example."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.head = nn.Linear(2, 4), nn.Linear(4, 3)

    def forward(self, inputs: Tensor) -> Tensor:
        logits: Tensor = self.head(self.inner(inputs.view(-1, 3, 2)).tanh().mean(1))
        return logits


@pytest.mark.parametrize(
    ("make_model", "shape", "products"),
    [
        (mlp, (6,), {"0.weight", "2.weight"}),
        (conv_net, (1, 6, 6), {"7.weight"}),
        (OnSequences, (6,), {"inner.weight", "head.weight"}),
    ],
)
def test_the_gradients_of_linear_layers_stay_products(
    make_model: MakeModel, shape: tuple[int, ...], products: set[str]
) -> None:
    """Their products are the gradients; other gradients are returned directly."""
    gradient = BlockGradient(make_model, CrossEntropy(), device=CPU, precision=Precision.FLOAT32)
    generator = torch.Generator().manual_seed(0)
    weights = {
        name: torch.randn(2, *gradient.layout.by_name[name].shape, generator=generator)
        for name in gradient.trainable
    }
    stack, shared = Stack(weights, {}, {}), Shared({}, {}, {})
    batch = Batch(
        torch.randn(2, 4, *shape, generator=generator),
        torch.randint(0, 3, (2, 4), generator=generator),
        torch.full((2, 4), 0.25),
        torch.zeros(2, dtype=torch.int64),
    )
    traced = TracedSteps(gradient, is_compiled=False)(stack, shared, batch)
    expected = gradient(stack, shared, batch).grads
    assert traced.factors.keys() == products
    assert traced.grads.keys() == expected.keys() - products
    for name, (left, right) in traced.factors.items():
        assert torch.allclose(left @ right, expected[name], atol=1e-6)


def test_a_label_beyond_the_outputs_is_its_clients_failure_where_steps_are_compiled() -> None:
    """An EngineError would end the run of all clients."""
    gradient = BlockGradient(mlp, CrossEntropy(), device=CPU, precision=Precision.FLOAT32)
    weights = {
        name: torch.ones(1, *gradient.layout.by_name[name].shape) for name in gradient.trainable
    }
    batch = Batch(
        torch.ones(1, 2, 6),
        torch.tensor([[0, 7]]),
        torch.full((1, 2), 0.5),
        torch.zeros(1, dtype=torch.int64),
    )
    with pytest.raises((IndexError, ValueError)) as raised:
        TracedSteps(gradient, is_compiled=True)(Stack(weights, {}, {}), Shared({}, {}, {}), batch)
    assert not isinstance(raised.value, EngineError)


class Scaled(nn.Module):
    """Reads a constant as a number, which cannot be traced."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(6, 3)
        self.register_buffer("scale", torch.tensor(2))

    def forward(self, inputs: Tensor) -> Tensor:
        logits: Tensor = self.layer(inputs) * int(self.get_buffer("scale"))
        return logits


def test_a_model_that_cannot_be_traced_is_stacked_all_the_same() -> None:
    """It runs without a trace, which only compiling needs."""
    work = work_of(to_params(Scaled))
    assert error_of(Scaled, work) < 1e-6
    with pytest.raises(EngineError, match="without compiling"):
        executor(Scaled, CrossEntropy(), is_compiled=True).train(work)


@pytest.mark.slow
def test_regression_with_a_loss_of_the_users_own() -> None:
    """Float labels, outputs of shape [batch, 1], and any per-example loss."""

    def make() -> nn.Module:
        return nn.Linear(6, 1)

    def huber(outputs: Tensor, labels: Tensor) -> Tensor:
        return F.huber_loss(outputs.flatten(), labels, reduction="none")

    work = work_of(to_params(make), labels=torch.linspace(-2, 2, 40))
    for objective in (MeanSquaredError(), CustomLoss(huber)):
        assert error_of(make, work, objective=objective) < 1e-6


def test_a_loss_that_couples_examples_is_exact() -> None:
    """Batches of equal size train together without padding; the loss of a batch is one number."""

    def contrast(outputs: Tensor, labels: Tensor) -> Tensor:
        return F.cross_entropy(outputs, labels) + (outputs - outputs.mean(0)).square().mean()

    coupled = CustomLoss(contrast, per_example=False)
    assert error_of(mlp, work_of(to_params(mlp)), objective=coupled) < 1e-6


@pytest.mark.slow
def test_bfloat16_trains_close_to_the_reference() -> None:
    """Both apply mixed precision to the forward pass and the loss."""
    work = work_of(to_params(mlp))
    model = ResidentModel(mlp, CrossEntropy(), device=CPU, precision=Precision.BFLOAT16)
    expected = SequentialExecutor(model).train(work)
    gradient = BlockGradient(mlp, CrossEntropy(), device=CPU, precision=Precision.BFLOAT16)
    found = StackedExecutor(gradient, is_compiled=False).train(work)
    assert 0 < distance(reference(mlp, work, CrossEntropy()), found) < 0.02
    assert distance(expected, found) < 0.02  # a few units in the last of 8 bits


@pytest.mark.slow
def test_repeated_training_is_bitwise_equal() -> None:
    """The same work gives the same bits, and the application's random state is unchanged."""
    work = work_of(to_params(mlp_with_dropout))
    stack = executor(mlp_with_dropout, CrossEntropy())
    before = torch.get_rng_state()
    first = stack.train(work).deltas_KP.clone()
    assert torch.equal(first, stack.train(work).deltas_KP)
    assert torch.equal(before, torch.get_rng_state())


@pytest.mark.slow
def test_a_wrong_update_is_noticed() -> None:
    """The control of all comparisons: a learning rate off by a thousandth is noticed."""
    work = work_of(to_params(mlp))
    wrong = replace(work, local=replace(PLAIN, learning_rate=0.1001))
    found = executor(mlp, CrossEntropy()).train(wrong)
    assert distance(reference(mlp, work, CrossEntropy()), found) > 1e-5


def test_weights_of_another_model_are_refused() -> None:
    """The sequential executor refuses them as well."""
    work = work_of(to_params(mlp))
    with pytest.raises(ValueError, match="another model"):
        executor(batch_norm_net, CrossEntropy()).train(work)


@pytest.mark.parametrize(
    ("make_model", "shape"),
    [(mlp, (6,)), (mlp_with_dropout, (6,)), (batch_norm_net, (6,)), (conv_net, (1, 6, 6))],
)
def test_models_that_stack_are_not_refused(make_model: MakeModel, shape: tuple[int, ...]) -> None:
    """The control of the reasons below."""
    rule = replace(PLAIN, momentum=0.9, keep_momentum=True, weight_decay=0.01)
    local = Proximal(inner=rule, proximal=0.1)
    assert reason(make_model, work_of(to_params(make_model), shape=shape, local=local)) is None


class Branching(nn.Module):
    """Branches on a value."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(6, 3)

    def forward(self, inputs: Tensor) -> Tensor:
        logits: Tensor = self.layer(inputs)
        return logits if logits.sum().item() > 0 else 2 * logits


class FunctionalDropout(Branching):
    """Draws from the global generator."""

    def forward(self, inputs: Tensor) -> Tensor:
        logits: Tensor = self.layer(F.dropout(inputs, 0.5, self.training))
        return logits


class Counting(Branching):
    """Counts its calls in a Python attribute."""

    calls = 0

    def forward(self, inputs: Tensor) -> Tensor:
        self.calls += 1
        logits: Tensor = self.layer(inputs) / self.calls
        return logits


class Doubling(torch.autograd.Function):
    """An old-style function, without ``setup_context`` or a rule for ``vmap``."""

    @staticmethod
    def forward(_ctx: object, inputs: Tensor) -> Tensor:
        return inputs * 2

    @staticmethod
    def backward(_ctx: object, *grads: Tensor) -> Tensor:
        return grads[0] * 2


class OldFunction(Branching):
    """Applies the old-style function."""

    def forward(self, inputs: Tensor) -> Tensor:
        double: Callable[[Tensor], Tensor] = Doubling.apply
        return double(self.layer(inputs))


def attention() -> nn.Module:
    """A transformer layer with dropout inside its attention."""
    layer = nn.TransformerEncoderLayer(6, 2, 8, dropout=0.1, batch_first=True)
    return nn.Sequential(nn.Unflatten(1, (1, 6)), layer, nn.Flatten(), nn.Linear(6, 3))


@pytest.mark.parametrize(
    ("make_model", "says"),
    [
        (Branching, "RuntimeError: .*item"),
        (FunctionalDropout, "draws random numbers"),
        (attention, "draws random numbers"),
        (Counting, "changes 'calls' of the model"),
        (OldFunction, "RuntimeError: .*vmap"),
    ],
)
def test_what_cannot_be_stacked_is_reported(make_model: MakeModel, says: str) -> None:
    """The reason is readable, and the sequential executor trains the model."""
    work = work_of(to_params(make_model))
    found = reason(make_model, work)
    assert found is not None
    assert "\n" not in found
    assert re.search(says, found), found
    assert reference(make_model, work, CrossEntropy()).deltas_KP.abs().max() > 0


def test_hidden_random_numbers_are_an_error_and_never_other_masks() -> None:
    """Training refuses even if no trial has run."""
    with pytest.raises(RuntimeError, match="random"):
        executor(FunctionalDropout, CrossEntropy()).train(work_of(to_params(FunctionalDropout)))


def test_convolutional_models_are_trained_in_smaller_blocks() -> None:
    """At least two at a time; the blocks of other models depend on their parameters only."""
    blocks = [
        stacked.choose_block_size(Layout.of(nn.Sequential(first, nn.Linear(width, 10))), PLAIN)
        for first, width in (
            (nn.Linear(64, 200), 200),
            (nn.Conv2d(1, 32, 5), 20_000),
            (nn.Conv2d(3, 64, 3), 200_000),
        )
    ]
    assert blocks == [64, 3, 2]


def test_blocks_by_example_are_no_larger_and_hold_all_gradients_of_a_batch() -> None:
    """With 32 bits per number in 128 MiB; control: plain blocks of the same models are larger."""
    by_example = NoisedGradients(inner=PLAIN, example_clip_norm=1.0, example_noise_multiplier=1.0)
    for width, batch_size in ((10, 4), (200, None), (2000, 64)):
        layout = Layout.of(nn.Sequential(nn.Linear(784, width), nn.Linear(width, 10)))
        rule = replace(by_example, inner=replace(PLAIN, batch_size=batch_size))
        block, plain = (
            stacked.choose_block_size(layout, rule),
            stacked.choose_block_size(layout, PLAIN),
        )
        together = min(32, batch_size or 32)
        assert block <= plain
        assert block == max(2, min(plain, 2**27 // (4 * layout.size * together)))
        assert (block < plain) == (width == 200)


def test_a_missing_compiler_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    """With its name, and a fix."""
    monkeypatch.setenv("CXX", "no-such-compiler")
    found = explain_not_compiled()
    assert found is not None
    assert "no-such-compiler" in found


needs_compiler = pytest.mark.skipif(
    explain_not_compiled() is not None, reason=str(explain_not_compiled())
)
#: On one worker, so that tests reuse each other's compiled code.
together = pytest.mark.xdist_group("compiled")


@needs_compiler
@together
@pytest.mark.slow
@pytest.mark.parametrize(
    ("make_model", "local", "cohorts"),
    [
        # One height is compiled, for two steps with different masks: each takes 20 s.
        (small_net_with_dropout, PLAIN, [(8, 7, 6)]),
        (
            batch_norm_net,
            replace(PLAIN, momentum=0.9, weight_decay=0.01),
            [(11, 10, 8, 7, 3), (8, 6, 3), (11, 11, 11, 11, 6)],
        ),
    ],
)
def test_compiled_equals_eager_equals_sequential(
    make_model: MakeModel, local: LocalSgd, cohorts: list[tuple[int, ...]]
) -> None:
    """Dropout masks, and statistics if batches of one size train together."""
    params, objective = to_params(make_model), CrossEntropy()
    compiled = executor(make_model, objective, is_compiled=True)
    eager = executor(make_model, objective)
    for sizes in cohorts:
        work = work_of(params, local=local, sizes=sizes)
        expected = reference(make_model, work, objective)
        assert distance(expected, eager.train(work)) < 1e-6
        assert distance(expected, compiled.train(work)) < 1e-6


def test_few_shapes_are_traced_and_the_update_rule_is_not_part_of_them(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Other rules, learning rates and ragged cohorts are not traced separately.

    Each trace is compiled where steps are. At most five clients finish one after another; each
    number of them would be another shape.
    """
    traced = list[object]()

    def counting(function: Callable[..., object]) -> Callable[..., object]:
        traced.append(function)
        return make_fx(function)

    monkeypatch.setattr(stacked_trace, "make_fx", counting)
    params, objective = to_params(mlp), CrossEntropy()
    stacked_executor = executor(mlp, objective)
    for local in (PLAIN, replace(PLAIN, learning_rate=0.05, momentum=0.9, weight_decay=0.01)):
        for sizes in ((20, 14, 11, 7, 3), (4,) * 5, (20, 3, 2, 1), (3, 1)):
            work = work_of(params, local=local, sizes=sizes)
            expected = reference(mlp, work, objective)
            assert distance(expected, stacked_executor.train(work)) < 1e-6
    assert 0 < len(traced) <= stacked.NUM_HEIGHTS


@needs_compiler
@together
@pytest.mark.slow
def test_a_model_that_cannot_be_stacked_raises_the_same_error_where_steps_are_compiled() -> None:
    """The trial before the first round names it, and suggests another executor."""
    work = work_of(to_params(Branching), sizes=(4, 4))
    with pytest.raises(RuntimeError, match="item"):
        executor(Branching, CrossEntropy(), is_compiled=True).train(work)
