"""Spreading work on memory over cores: each element once, the same bits for any number of cores."""

import threading

import pytest
import torch
from torch import nn

from fedlearn.algorithms.aggregations import WeightedMean
from fedlearn.algorithms.collector import RoundRequest
from fedlearn.algorithms.lanes import DELTA, Updates
from fedlearn.algorithms.local import LocalSgd
from fedlearn.algorithms.recipes import FedAvg
from fedlearn.core import cores
from fedlearn.core.cores import run_on_all_cores
from fedlearn.core.messages import ClientId, Failure, TrainReply
from fedlearn.core.params import Layout, Params
from fedlearn.core.soundness import MAX_DELTA, describe_unsound
from fedlearn.rounds.updates import validate
from fedlearn.transport.base import Arrival

LARGE = 3 * (1 << 20) + 5


def use(num: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cores, "count_cores", lambda: num)


@pytest.mark.parametrize("num", [1, 2, 3, 64])
def test_each_element_is_in_one_part(num: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """There are as many parts as cores, unless each would be too small."""
    use(num, monkeypatch)
    parts = run_on_all_cores(LARGE, lambda part: part)
    assert len(parts) == min(num, 3)
    assert [place for part in parts for place in (part.start, part.stop)][1:-1:2] == [
        part.start for part in parts[1:]
    ]
    assert (parts[0].start, parts[-1].stop) == (0, LARGE)


def test_parts_run_together_and_few_elements_here(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each part waits for the others, so one after the other they would deadlock."""
    use(3, monkeypatch)
    met = threading.Barrier(3)
    assert sorted(run_on_all_cores(LARGE, lambda _: met.wait(30.0))) == [0, 1, 2]
    assert run_on_all_cores(10, lambda _: threading.get_ident()) == [threading.get_ident()]


def test_what_fails_in_a_part_is_raised(monkeypatch: pytest.MonkeyPatch) -> None:
    use(2, monkeypatch)
    with pytest.raises(ZeroDivisionError):
        run_on_all_cores(LARGE, lambda part: 1 // part.start)


def test_the_mean_has_the_same_bits_on_any_number_of_cores(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    mean, layout = WeightedMean(by_examples=True), Layout.of(nn.Linear(LARGE, 1, bias=False))
    draws = torch.Generator().manual_seed(0)
    rows = [torch.randn(LARGE, generator=draws) for _ in range(3)]
    found = []
    for num in (1, 2, 3):
        use(num, monkeypatch)
        state = mean.init([DELTA], layout, device=torch.device("cpu"))
        clients = [ClientId(client) for client in range(3)]
        block = Updates(clients, torch.tensor([1.0, 7.0, 3.0]), {"delta": rows}, [0] * 3)
        found.append(mean.finalize(mean.accumulate(state, block)).lanes["delta"])
    assert torch.equal(found[0], found[1])
    assert torch.equal(found[0], found[2])


@pytest.mark.parametrize("place", [0, LARGE // 2, LARGE - 1])
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), 2 * MAX_DELTA])
def test_what_is_not_sound_is_found_in_every_part(
    place: int, bad: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    use(3, monkeypatch)
    delta = torch.zeros(LARGE)
    request = RoundRequest(
        round_num=0,
        attempt=0,
        params=Params.of(nn.Linear(LARGE, 1, bias=False)),
        strategy=FedAvg(LocalSgd(epochs=1, batch_size=1, learning_rate=0.1)),
        broadcast={},
        seed=0,
    )

    def check() -> TrainReply | Failure:
        reply = TrainReply(round_num=0, lanes={"delta": delta}, num_examples=1, metrics={})
        return validate(Arrival(ClientId(0), reply, 0.0), request)

    assert isinstance(check(), TrainReply)
    delta[place] = bad
    assert check() == Failure(describe_unsound("delta"))
