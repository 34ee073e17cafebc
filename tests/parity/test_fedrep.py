"""FedRep, next to an independent float64 reference: two optimizers of torch, one for each part."""

import copy
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fedlearn as fl
from fedlearn.algorithms.fedrep import HeadThenBody
from fedlearn.algorithms.local import Moment
from fedlearn.errors import ConfigError
from tests.moments import KnownSteps
from tests.parity import test_local_parts as parts

#: Three epochs, of which the trial of an executor takes two.
SGD = fl.LocalSgd(
    epochs=3, batch_size=4, learning_rate=0.2, momentum=0.5, weight_decay=0.01, shuffle=False
)
HEAD = ("3.*",)


def train_in_turn(start: nn.Module) -> tuple[dict[str, Tensor], list[dict[str, Tensor]]]:
    """Return the shared tensors and each client's head after all rounds, in float64."""
    features, labels, owners = parts.draw_examples()
    shared = {name: value.double() for name, value in start.state_dict().items()}
    heads = [{n: v for n, v in shared.items() if parts.is_head(n)}] * parts.NUM_CLIENTS
    for _ in range(parts.NUM_ROUNDS):
        bodies = dict[str, Any]()
        for client in range(parts.NUM_CLIENTS):
            x = torch.from_numpy(features[owners == client]).double()
            y = torch.from_numpy(labels[owners == client])
            model = copy.deepcopy(start).double()
            model.load_state_dict({**shared, **heads[client]})
            # Clients take 3 to 4 steps in an epoch, so they change parts at different steps.
            for part, num_epochs in ((True, 1), (False, 2)):
                own = [p for n, p in model.named_parameters() if parts.is_head(n) is part]
                optimizer = torch.optim.SGD(own, lr=0.2, momentum=0.5, weight_decay=0.01)
                for _ in range(num_epochs):
                    for first in range(0, len(y), 4):
                        optimizer.zero_grad()
                        batch = slice(first, first + 4)
                        nn.functional.cross_entropy(model(x[batch]), y[batch]).backward()
                        optimizer.step()
            after = {name: value.detach().clone() for name, value in model.state_dict().items()}
            heads[client] = {n: v for n, v in after.items() if parts.is_head(n)}
            for name in after.keys() - heads[client].keys():
                bodies[name] = bodies.get(name, 0.0) + len(y) * after[name] / len(labels)
        shared |= bodies
    return {n: v for n, v in shared.items() if not parts.is_head(n)}, heads


@pytest.mark.parametrize("way", parts.WAYS)
def test_heads_and_body_train_in_turn(way: Mapping[str, Any]) -> None:
    """Momentum and weight decay do not move the other part."""
    start = parts.build_initial_model(parts.make_plain_model)
    shared, heads = train_in_turn(start)
    algorithm = fl.FedRep(SGD, head_layers=HEAD, head_epochs=1)
    run = parts.simulate(algorithm, make=parts.make_plain_model, **way)
    found = run.weights(best=False)
    for name, value in shared.items():
        torch.testing.assert_close(found[name].double(), value, atol=1e-5, rtol=0.0)
    for client, head in enumerate(heads):
        expected = torch.cat([value.flatten() for value in head.values()])
        own = run.client_state(client)["local"].double()
        torch.testing.assert_close(own, expected, atol=1e-5, rtol=0.0)
    assert "clients/personal_accuracy_mean" in run.history[-1].metrics


def test_training_both_at_once_differs() -> None:
    """The control: FedPer keeps the same head."""
    shared, _ = train_in_turn(parts.build_initial_model(parts.make_plain_model))
    plain = fl.FedPer(SGD, personal_layers=HEAD)
    found = parts.simulate(plain, make=parts.make_plain_model).weights(best=False)
    assert max(float((found[n].double() - v).abs().max()) for n, v in shared.items()) > 1e-3


class Epochs(KnownSteps):
    """Two clients, of which the second is an epoch ahead."""

    @property
    def epochs_K(self) -> Tensor:
        return torch.tensor([0, 1])


def test_only_the_trained_part_counts_in_the_norm_of_a_gradient() -> None:
    """Each client moves its part by at most the clip norm; the other gradient may be NaN."""
    clipped = fl.ClippedGradients(inner=replace(SGD, momentum=0.0), gradient_clip_norm=1.0)
    local = HeadThenBody(inner=clipped, head="head", head_epochs=1)
    x = [torch.zeros(2, 2), torch.zeros(2, 1)]
    grads = [torch.tensor([[torch.nan, 4.0], [3.0, 4.0]]), torch.tensor([[5.0], [7.0]])]
    info = Epochs(torch.tensor([6.0, 3.0]), names=("body", "head"))
    local.step(x, grads, {}, broadcast={}, moment=Moment(0, 1, info=info))
    torch.testing.assert_close(x[0], torch.tensor([[0.0, 0.0], [-0.12, -0.16]]))
    torch.testing.assert_close(x[1], torch.tensor([[-0.2], [0.0]]))


@pytest.mark.parametrize(
    ("head_layers", "head_epochs", "problem"),
    [
        (HEAD, 3, "head_epochs is 3, but a client trains for 3 epochs"),
        (HEAD, 0, "head_epochs is 0; give a number >= 1"),
        (("type:Linear",), 1, "head_layers has 'type:Linear'; give patterns of names"),
        ((), 1, "head_layers has ''"),
    ],
)
def test_settings_without_a_head_or_a_body_are_refused(
    head_layers: tuple[str, ...], head_epochs: int, problem: str
) -> None:
    with pytest.raises((ConfigError, ValueError), match=problem):
        fl.FedRep(SGD, head_layers=head_layers, head_epochs=head_epochs)


def test_a_pattern_that_leaves_no_head_or_no_body_is_refused_before_the_first_round() -> None:
    """Also where nothing stays local by name, so that nothing else would notice."""
    for pattern, problem in (("hed.*", "no trained parameter"), ("*", "every trained parameter")):
        local = HeadThenBody(inner=SGD, head=pattern, head_epochs=1)
        with pytest.raises(ConfigError, match=f"^head_layers .*, which matches {problem}"):
            parts.simulate(fl.FedAvg(local), make=parts.make_plain_model)
