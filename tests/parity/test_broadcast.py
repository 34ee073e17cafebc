"""Broadcast values of each extent: how clients see them, what is refused, and what is sent once."""

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor, nn

import fedlearn as fl
from fedlearn.algorithms.collector import GlobalModel, RoundRequest
from fedlearn.algorithms.lanes import Lanes, Over
from fedlearn.algorithms.local import (
    Broadcasts,
    BroadcastSpec,
    LocalUpdateWrapper,
    Memory,
    Moment,
    Tensors,
    lay_out_broadcast,
    takes_flat,
)
from fedlearn.algorithms.strategy import State, StepResult
from fedlearn.core.codec import decode, encode, encode_constants, split
from fedlearn.core.messages import TrainRequest
from fedlearn.core.params import Params
from fedlearn.errors import ConfigError, ProtocolError, RoundError
from fedlearn.rounds.evaluation import build_evaluate_request
from fedlearn.rounds.strategy_calls import call_broadcast, select_sent_once
from tests.parity import shelf, shelf_broadcast
from tests.parity.shelf_broadcast import ANCHOR, STRENGTH, Anchored, AnchoredAveraging

SGD = fl.LocalSgd(epochs=1, batch_size=4, learning_rate=0.1)
ANCHORED = AnchoredAveraging(Anchored(inner=SGD), fl.WeightedMean(by_examples=False))


class WithScalar(nn.Module):
    """Parameters of zero to two dimensions, and statistics."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.norm = nn.Linear(3, 2), nn.BatchNorm1d(2)
        self.scale = nn.Parameter(torch.ones(()))


def test_clients_see_each_extent_in_the_shape_of_their_tensors() -> None:
    params = Params.of(WithScalar())
    layout = params.layout
    assert (layout.size, layout.num_trainable, len(layout.trainable)) == (17, 13, 5)
    overs: dict[str, Over | int] = {"pair": 2, **{over.value: over for over in Over}}
    specs = {name: BroadcastSpec(over=over) for name, over in overs.items()}
    sizes = {"pair": 2, "all": 17, "trainable": 13, "tensors": 5}
    sent = {name: torch.arange(1.0, size + 1).double() for name, size in sizes.items()}
    found = lay_out_broadcast(sent, specs, layout=layout, params_P=params.vector)
    shapes = [spec.shape for spec in layout.trainable]
    assert [each.shape[1:] for each in found["trainable"]] == shapes
    assert torch.cat([each.flatten() for each in found["trainable"]]).tolist() == [*range(1, 14)]
    for number, shape, value in zip(range(1, 6), shapes, found["tensors"], strict=True):
        assert (torch.ones(4, *shape) * value).shape == (4, *shape), "it broadcasts with x"
        assert value.item() == number
    assert [each.shape for each in found["pair"]] == [(1, 2)]
    assert [each.shape for each in found["all"]] == [(1, 17)]
    assert all(each.dtype == torch.float32 for values in found.values() for each in values)


@pytest.mark.parametrize(
    ("sent", "problem"),
    [
        ({STRENGTH: torch.ones(1)}, "reads the broadcast value 'anchor', which the strategy"),
        ({STRENGTH: torch.ones(2), ANCHOR: torch.ones(75)}, r"over 1, so its shape must be \(1,\)"),
        ({STRENGTH: torch.ones(()), ANCHOR: torch.ones(75)}, r"'strength' of shape \(\)"),
        (
            {STRENGTH: torch.ones(1), ANCHOR: torch.ones(75), "new": torch.ones(1)},
            "declare another extent in broadcasts of the local update",
        ),
    ],
)
def test_values_that_do_not_fit_their_declaration_are_refused(sent: Lanes, problem: str) -> None:
    """Before the first client is asked, with the strategy's name."""

    class Wrong(AnchoredAveraging):
        def broadcast(self, state: State) -> Lanes:
            return sent

    strategy, params = Wrong(Anchored(inner=SGD), fl.WeightedMean(by_examples=False)), shelf.start
    with pytest.raises(RoundError, match=rf"Wrong\.broadcast: .*{problem}"):
        call_broadcast(strategy, {}, params(strategy))
    with pytest.raises(ValueError, match="0 numbers; give at least one"):
        BroadcastSpec(over=0)


def test_one_number_per_tensor_needs_separate_tensors() -> None:
    @dataclass(frozen=True, kw_only=True)
    class Both(Anchored):
        takes_flat: ClassVar[bool] = True

        @property
        def broadcasts(self) -> Broadcasts:
            return {**super().broadcasts, "weights": BroadcastSpec(over=Over.TENSORS)}

    assert takes_flat(Anchored(inner=SGD))
    assert not takes_flat(Both(inner=SGD))


def request_of(strategy: AnchoredAveraging) -> RoundRequest:
    params = shelf.start(strategy)
    state = strategy.init(params)
    return RoundRequest(
        round_num=0,
        attempt=0,
        params=params,
        strategy=strategy,
        broadcast=call_broadcast(strategy, state, params),
        seed=1,
    )


def test_what_is_sent_once_is_not_in_the_requests_of_a_round() -> None:
    """Its digest is, so that a client that lacks it downloads it; then requests are complete."""
    request = request_of(ANCHORED)
    whole = request.message()
    bare, apart = split(whole)
    assert isinstance(bare, TrainRequest)
    assert list(bare.broadcast) == [STRENGTH]
    assert list(apart) == ["told/anchor"]
    anchor_bytes = 4 * request.params.layout.num_trainable
    assert len(encode(whole)) - len(encode(bare)) > anchor_bytes
    assert request.download_bytes == request.params.num_bytes + 8  # the strength, in float64
    found = decode(encode(bare), constants=encode_constants(apart))
    assert isinstance(found, TrainRequest)
    assert encode(found) == encode(replace(whole, broadcast=dict(sorted(found.broadcast.items()))))
    with pytest.raises(ProtocolError, match="lacks the constants"):
        decode(encode(bare))
    with pytest.raises(ProtocolError, match=r"\['strength'\] are in the request and in"):
        decode(encode(bare), constants=encode_constants({"told/strength": torch.ones(1)}))


def test_an_evaluation_names_the_same_constants_as_a_training() -> None:
    """A client keeps one set, so two different ones would be downloaded in turns."""

    class Frozen(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.base = nn.Linear(200, 200).requires_grad_(False)
            self.head = nn.Linear(200, 3)

    for module, is_large in ((Frozen(), True), (shelf.make_model(), False)):
        params = Params.of(module)
        state = ANCHORED.init(params)
        request = replace(
            request_of(ANCHORED), params=params, broadcast=ANCHORED.broadcast(state)
        ).message()
        once = select_sent_once(ANCHORED, state, params)
        model = GlobalModel(params=params, round_num=1, sent_once=once)
        evaluation = build_evaluate_request(model, ANCHORED, [])
        if is_large:
            assert encode_constants(evaluation.constants) == encode_constants(request.constants)
        else:
            # Without constants of the model, an evaluation leaves alone what the client keeps.
            assert not evaluation.constants


def simulate(strategy: Any, **settings: Any) -> fl.Run:
    data = fl.from_arrays(
        torch.randn(60, 5, generator=torch.Generator().manual_seed(1)).numpy(),
        torch.arange(60).remainder(3).numpy(),
        partition=fl.Iid(6),
        seed=0,
        test_fraction=0.1,
    )
    settings = {"num_rounds": 4, "seed": 1, **settings}
    return fl.simulate(shelf.make_model, data, strategy, **settings)


@dataclass(frozen=True, kw_only=True)
class Damped(LocalUpdateWrapper):
    """Scales gradients by a number of the strategy's."""

    @property
    def broadcasts(self) -> Broadcasts:
        return {"factor": BroadcastSpec(over=1)}

    def step(
        self, x: Tensors, grads: Tensors, memory: Memory, *, broadcast: Memory, moment: Moment
    ) -> None:
        damped = [grad * broadcast["factor"][0] for grad in grads]
        self.inner.step(x, damped, memory, broadcast=broadcast, moment=moment)


@dataclass(frozen=True)
class Damping(fl.Strategy):
    """FedAvg that halves the factor in each round."""

    local: Damped
    aggregation: fl.WeightedMean

    def init(self, params: Params) -> State:
        return {"factor": torch.ones(1)}

    def broadcast(self, state: State) -> Lanes:
        return dict(state)

    def step(self, params: Params, aggregate: fl.Aggregate, state: State) -> StepResult:
        vector = params.vector + aggregate.lanes["delta"]
        return StepResult(params.with_vector(vector), {"factor": state["factor"] / 2})


@pytest.mark.usefixtures("surroundings")
def test_numbers_may_be_broadcast_where_parts_stay_local_and_vectors_may_not() -> None:
    """The server has no values for the local parts."""
    damping = Damping(Damped(inner=SGD), fl.WeightedMean(by_examples=True))
    cohort = {"num_wanted": 3}
    run = simulate(fl.KeepLocal(damping, ["2.*"]), cohort=cohort)
    with pytest.raises(ConfigError, match="exchanges 'anchor'"):
        simulate(fl.KeepLocal(ANCHORED, ["2.*"]), cohort=cohort)
    usual = simulate(fl.KeepLocal(fl.FedAvg(SGD), ["2.*"]), cohort=cohort)
    assert not torch.equal(run.weights()["0.weight"], usual.weights()["0.weight"])


def weights_of(run: fl.Run) -> Tensor:
    return torch.cat([each.flatten() for each in run.weights(best=False).values()])


def test_an_asynchronous_run_resumes_with_the_values_of_each_round(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Clients in flight keep the numbers that they were sent with their model."""
    monkeypatch.chdir(tmp_path)
    settings: dict[str, Any] = {
        "asynchronous": {"mode": "buffered", "buffer_size": 2, "concurrency": 5},
        "engine": {"executor": "sequential"},
        "store": {"checkpoint_every_s": 0.0},
    }

    class Stop:
        def after_round(self, record: fl.RoundRecord, model: Any) -> None:
            if record.round_num == 1:
                raise KeyboardInterrupt

    whole = simulate(ANCHORED, **settings)
    with pytest.raises(KeyboardInterrupt):
        simulate(ANCHORED, name="stopped", callbacks=[Stop()], **settings)
    resumed = simulate(ANCHORED, resume="stopped", **settings)
    assert torch.equal(weights_of(whole), weights_of(resumed))

    class Forgets(shelf_broadcast.AnchoredAveraging):
        """The control: the strength stays as it is."""

        def step(self, params: Params, aggregate: fl.Aggregate, state: State) -> StepResult:
            return replace(super().step(params, aggregate, state), state=state)

    control = simulate(Forgets(ANCHORED.local, ANCHORED.aggregation), **settings)
    assert not torch.equal(weights_of(whole), weights_of(control))
