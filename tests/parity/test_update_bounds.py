"""Norms of updates cover the trainable part, and their bounds hold wherever clients train."""

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import fedlearn as fl
from fedlearn.algorithms.transforms import ClippedUpdates
from fedlearn.core.participations import Status

pytestmark = pytest.mark.usefixtures("ready_store")

NUM_CLIENTS = 6
ENGINES: Mapping[str, Mapping[str, Any]] = {
    "one by one": {"executor": "sequential", "block_size": 1, "num_workers": 1},
    "in a block": {"executor": "sequential", "block_size": NUM_CLIENTS, "num_workers": 1},
    "in sessions": {"transport": "memory", "num_workers": 1},
}
#: Features of client k have a scale of about k + 1, so that all its norms differ from the others'.
RNG = np.random.default_rng(0)
GROUPS = np.repeat(np.arange(NUM_CLIENTS), 8)
FEATURES = (RNG.normal(size=(48, 3)) * 20 * (GROUPS[:, None] + 1)).astype("float32")
LABELS = RNG.integers(0, 2, 48)


def make_model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.BatchNorm1d(3), nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2))


def run_of(
    engine: str,
    *,
    clip: float | None = None,
    make: Callable[[], nn.Module] = make_model,
    **settings: Any,
) -> fl.Run:
    data = fl.from_arrays(
        FEATURES, LABELS, groups=GROUPS, partition=fl.Natural(), test=(FEATURES, LABELS), seed=0
    )
    is_private = "privacy" in settings
    local = fl.LocalSgd(epochs=2, batch_size=None, learning_rate=0.3)
    transforms = () if clip is None else (ClippedUpdates(update_clip_norm=clip),)
    return fl.simulate(
        make,
        data,
        replace(fl.FedAvg(local, weight_by_examples=not is_private), transforms=transforms),
        num_rounds=1,
        engine=ENGINES[engine],
        cohort={"num_wanted": NUM_CLIENTS} | ({"sampling": "uniform"} if is_private else {}),
        **settings,
    )


def failures(run: fl.Run) -> dict[int, str]:
    rows = run.history[-1].participations
    return {row.client_id: str(row.reason) for row in rows if row.status is Status.FAILED}


def parts(tensors: Mapping[str, Tensor]) -> tuple[Tensor, Tensor]:
    """Return the trainable parameters and the running statistics."""
    statistics = [tensors[name] for name in ("0.running_mean", "0.running_var")]
    trained = [tensors[name] for name, _ in make_model().named_parameters()]
    return torch.cat([each.flatten() for each in trained]), torch.cat(statistics)


def deltas_by_hand(losses: list[float] | None = None) -> list[tuple[Tensor, Tensor]]:
    """Compute each client's change by two steps of plain torch; append its loss to ``losses``."""
    found, start = list[tuple[Tensor, Tensor]](), parts(make_model().state_dict())
    for client in range(NUM_CLIENTS):
        model, own = make_model(), client == GROUPS
        optimizer = torch.optim.SGD(model.parameters(), lr=0.3)
        total = 0.0
        for _ in range(2):
            optimizer.zero_grad()
            scores = model(torch.from_numpy(FEATURES[own]))
            loss = nn.functional.cross_entropy(scores, torch.from_numpy(LABELS[own]))
            loss.backward()
            optimizer.step()
            total += float(loss.detach())
        if losses is not None:
            losses.append(total / 2)
        local = parts(model.state_dict())
        found.append((local[0] - start[0], local[1] - start[1]))
    return found


def mean_by_hand(deltas: list[tuple[Tensor, Tensor]]) -> Tensor:
    changes = [torch.stack(each).mean(dim=0) for each in zip(*deltas, strict=True)]
    return torch.cat(parts(make_model().state_dict())) + torch.cat(changes)


@pytest.mark.parametrize("engine", ENGINES)
def test_running_statistics_are_not_counted_in_the_norm_of_an_update(engine: str) -> None:
    """Clients are refused by the norm of the trainable part; the statistics are far larger."""
    deltas = deltas_by_hand()
    norms = [float(trained.norm()) for trained, _ in deltas]
    assert min(float(statistics.norm()) for _, statistics in deltas) > 10 * max(norms)
    bound = float(np.median(norms))
    run = run_of(engine, updates={"max_norm": bound})
    reason = f"the norm of the delta exceeds {bound:g} (updates.max_norm)"
    too_long = [client for client, norm in enumerate(norms) if norm > bound]
    assert failures(run) == dict.fromkeys(too_long, reason)
    expected = mean_by_hand([deltas[k] for k in range(NUM_CLIENTS) if k not in too_long])
    found = torch.cat(parts(run.weights(best=False)))
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("engine", ENGINES)
def test_a_clip_scales_what_trains_and_leaves_statistics_alone(engine: str) -> None:
    """They are averaged as values. The record has the number of clipped updates."""
    deltas = deltas_by_hand()
    norms = [float(trained.norm()) for trained, _ in deltas]
    clip = float(np.median(norms))
    clipped = [
        (trained * min(1.0, clip / norm), statistics)
        for (trained, statistics), norm in zip(deltas, norms, strict=True)
    ]
    run = run_of(engine, clip=clip)
    found = torch.cat(parts(run.weights(best=False)))
    torch.testing.assert_close(found, mean_by_hand(clipped), rtol=1e-4, atol=1e-4)
    assert run.history[-1].metrics["num_clipped"] == sum(norm > clip for norm in norms)


def make_without_statistics() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2))


def test_how_many_were_clipped_is_not_recorded_with_noise() -> None:
    """The count would have no noise. Control: the test above, without noise."""
    privacy = {"mode": "central", "noise_multiplier": 1.0, "clip_norm": 1.0, "target_delta": 1e-3}
    run = run_of("one by one", clip=0.1, make=make_without_statistics, privacy=privacy)
    assert "num_clipped" not in run.history[-1].metrics


@pytest.mark.slow
@pytest.mark.parametrize("engine", ["one by one", "in sessions"])
def test_losses_that_a_secure_sum_cuts_off_are_counted(engine: str) -> None:
    """Both ways to simulate a secure sum count them; without any there is no count."""
    losses = list[float]()
    deltas_by_hand(losses)
    bound = float(np.median(losses))
    for max_loss, expected in ((bound, sum(loss > bound for loss in losses)), (100.0, None)):
        secure: dict[str, Any] = {"mode": "complete", "clip_norm": 50.0, "max_loss": max_loss}
        if engine == "one by one":
            secure["simulate_as"] = "modular_sum"
        run = run_of(engine, secure_aggregation=secure)
        assert run.history[-1].metrics.get("num_capped") == expected
