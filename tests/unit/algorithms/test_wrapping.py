"""Wrapped updates, in every order, equal a loop written by hand with torch.optim."""

from collections.abc import Callable, Mapping
from dataclasses import replace
from itertools import product

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fedlearn.algorithms.adam import LocalAdam
from fedlearn.algorithms.gradient_clipping import ClippedGradients
from fedlearn.algorithms.local import LocalSgd, LocalUpdate, LocalUpdateWrapper
from fedlearn.algorithms.objectives import CrossEntropy
from fedlearn.algorithms.proximal import Proximal
from fedlearn.algorithms.rate_schedules import ScheduledRate
from fedlearn.algorithms.scaffold import ControlVariates
from fedlearn.core.params import Params
from fedlearn.training.resident import Part, Precision, ResidentModel, Training
from tests.moments import SOME_CLIENT

RATE, BOUND, PULL, ROUND, NUM_STEPS = 0.2, 0.3, 0.7, 2, 5
SGD = LocalSgd(epochs=1, batch_size=4, learning_rate=RATE)
ADAM = LocalAdam(
    epochs=1,
    batch_size=4,
    learning_rate=RATE,
    beta_1=0.8,
    beta_2=0.9,
    epsilon=1e-3,
    decoupled=False,
    weight_decay=0.1,
    keep_moments=False,
)
INNER: Mapping[str, LocalUpdate] = {
    "sgd": SGD,
    "momentum": replace(SGD, momentum=0.9, weight_decay=0.1),
    "adam": ADAM,
    "adamw": replace(ADAM, decoupled=True),
}
AROUND: Mapping[str, Callable[[LocalUpdate], LocalUpdateWrapper]] = {
    "proximal": lambda inner: Proximal(inner=inner, proximal=PULL),
    "clipped": lambda inner: ClippedGradients(inner=inner, gradient_clip_norm=BOUND),
    "scheduled": lambda inner: ScheduledRate(inner=inner, rate_decay=0.8, warmup_steps=3),
    "control": lambda inner: ControlVariates(inner=inner, control_bound=None),
}
#: Outer wrapper, inner wrapper, and update.
ORDERS = list(product(AROUND, AROUND, INNER))


def makes_sense(outer: str, middle: str, inner: str) -> bool:
    """Whether a combination is valid: control variates may only wrap SGD at a constant rate."""
    if outer == "control":
        return False
    return middle != "control" or (inner in {"sgd", "momentum"} and outer != "scheduled")


def make_model() -> nn.Module:
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3)).double()


def batches() -> list[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(7)
    return [
        (torch.randn(4, 4, generator=generator).double(), torch.arange(4) % 3)
        for _ in range(NUM_STEPS)
    ]


def vectors(module: nn.Module) -> tuple[Tensor, Tensor]:
    """Return control variates of the server and the client: [Q] each."""
    size, generator = sum(p.numel() for p in module.parameters()), torch.Generator().manual_seed(9)
    server, client = 0.1 * torch.randn(2, size, generator=generator).double()
    return server, client


def optimizer_of(inner: str, module: nn.Module) -> torch.optim.Optimizer:
    match inner:
        case "sgd":
            return torch.optim.SGD(module.parameters(), lr=RATE)
        case "momentum":
            return torch.optim.SGD(module.parameters(), lr=RATE, momentum=0.9, weight_decay=0.1)
    kind = torch.optim.AdamW if inner == "adamw" else torch.optim.Adam
    return kind(module.parameters(), lr=RATE, betas=(0.8, 0.9), eps=1e-3, weight_decay=0.1)


def by_hand(wrappers: tuple[str, ...], inner: str) -> tuple[Tensor, Tensor]:
    """Run the loop by hand; return the model and the client's control variate."""
    module = make_model()
    start = [p.detach().clone() for p in module.parameters()]
    parameters, optimizer = list(module.parameters()), optimizer_of(inner, module)
    server, own = (
        [
            part.view_as(p)
            for part, p in zip(v.split([p.numel() for p in start]), start, strict=True)
        ]
        for v in vectors(module)
    )
    seen = list[Tensor]()
    for step, (x, y) in enumerate(batches()):
        optimizer.zero_grad()
        F.cross_entropy(module(x), y).backward()
        rate = RATE
        for wrapper in wrappers:
            grads = [p.grad for p in parameters if p.grad is not None]
            match wrapper:
                case "proximal":
                    for grad, p, p_0 in zip(grads, parameters, start, strict=True):
                        grad.add_(PULL * (p.detach() - p_0))
                case "clipped":
                    nn.utils.clip_grad_norm_(parameters, BOUND)
                case "scheduled":
                    rate *= 0.8**ROUND * min(1.0, (step + 1) / 3)
                case "control":
                    decay = 0.1 if inner == "momentum" else 0.0
                    decayed = [g + decay * p for g, p in zip(grads, parameters, strict=True)]
                    seen.append(torch.cat([each.detach().flatten() for each in decayed]))
                    for grad, c, c_i in zip(grads, server, own, strict=True):
                        grad.add_(c - c_i)
        optimizer.param_groups[0]["lr"] = rate
        optimizer.step()
    beta = 0.9 if inner == "momentum" else 0.0
    weights = [sum(beta**later for later in range(NUM_STEPS - step)) for step in range(NUM_STEPS)]
    control = torch.zeros(0)
    if seen:
        control = torch.tensor(weights).double() @ torch.stack(seen) / sum(weights)
    return nn.utils.parameters_to_vector(parameters).detach(), control


def ours(local: LocalUpdate) -> tuple[Tensor, Tensor]:
    """Train with fedlearn; return the same as :func:`by_hand`."""
    model = ResidentModel(
        make_model, CrossEntropy(), device=torch.device("cpu"), precision=Precision.FLOAT32
    )
    params = Params.of(make_model())
    server, own = vectors(make_model())
    has_control = "control" in local.memory
    broadcast = {"control": server} if has_control else {}
    training = Training(model, params, local=local, broadcast=broadcast, round_num=ROUND)
    client = replace(SOME_CLIENT, num_steps=len(list(batches())))
    with training.client({"control": own[None]} if has_control else {}, client=client):
        for x, y in batches():
            training.step([Part(x, y, 0)], num_examples=4)
        kept = training.report(mean_loss=lambda: 0.0).client_state
    return model.vector_P.clone(), kept["control"][0] if has_control else torch.zeros(0)


@pytest.mark.parametrize(
    ("outer", "middle", "inner"), [each for each in ORDERS if makes_sense(*each)]
)
def test_every_order_of_wrapping_is_the_loop_by_hand(outer: str, middle: str, inner: str) -> None:
    """The outermost wrapper acts first. Torch divides by norm + 1e-6, hence the tolerance."""
    found, control = ours(AROUND[outer](AROUND[middle](INNER[inner])))
    expected, expected_control = by_hand((outer, middle), inner)
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(control, expected_control, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    ("outer", "middle", "inner"), [each for each in ORDERS if not makes_sense(*each)]
)
def test_wrapping_without_meaning_is_refused(outer: str, middle: str, inner: str) -> None:
    """Refused on construction, in every order."""
    with pytest.raises(ValueError, match="SCAFFOLD"):
        AROUND[outer](AROUND[middle](INNER[inner]))


def test_the_order_of_a_pull_and_a_clip_makes_a_difference() -> None:
    """Control: the comparison above would notice a wrong order."""
    one, other = (
        by_hand(pair, "sgd")[0] for pair in (("proximal", "clipped"), ("clipped", "proximal"))
    )
    assert float((one - other).abs().max()) > 1e-3
