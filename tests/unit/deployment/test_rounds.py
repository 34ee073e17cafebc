"""Which clients evaluate in a deployed run, and evaluations that are refused at the start."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import pytest

from fedlearn import assembly
from fedlearn.assembly import Deployment
from fedlearn.config import load
from fedlearn.core.clock import VirtualClock
from fedlearn.core.messages import ClientId
from fedlearn.deployment.rounds import EvaluationDraw
from fedlearn.errors import ConfigError
from fedlearn.secagg.draw import RosterDraw
from fedlearn.transport.base import Exchange

SECURE = "secure_aggregation.mode=complete"
ENOUGH = "cohort.num_wanted=10"


@dataclass
class There:
    """A channel that only lists its clients."""

    client_ids: Sequence[ClientId]

    def available(self) -> Sequence[ClientId]:
        return self.client_ids

    def open(self, *, deadline_s: float) -> Exchange:
        raise NotImplementedError


def components(*overrides: str) -> Deployment:
    config = load(None, overrides=["stragglers.over_selection=1.0", *overrides])
    return assembly.build_deployment(config, data_dir=Path())


def draw_of(
    found: Deployment,
    there: There,
    *,
    busy: frozenset[ClientId] = frozenset(),
    num_elsewhere: Callable[[], int] = int,
) -> EvaluationDraw:
    return EvaluationDraw(
        components=found,
        channel=there,
        busy=lambda: busy,
        num_elsewhere=num_elsewhere,
        clock=VirtualClock(),
    )


@pytest.mark.parametrize(("num_there", "asked"), [(30, 20), (12, 12)])
def test_as_many_evaluate_as_are_wanted_or_there(num_there: int, asked: int) -> None:
    found = components("evaluation.clients=20")
    there = There([ClientId(each) for each in range(num_there)])
    num_clients, client_ids = draw_of(found, there)(3)
    assert num_clients == len(set(client_ids)) == asked
    assert set(client_ids) <= set(there.client_ids)


def test_who_has_a_task_is_not_asked_to_evaluate() -> None:
    """In an asynchronous run, some clients train while others evaluate."""
    there = There([ClientId(each) for each in range(30)])
    busy = frozenset(there.client_ids[:25])
    num_clients, client_ids = draw_of(components("evaluation.clients=20"), there, busy=busy)(3)
    assert num_clients == len(client_ids) == 5
    assert not busy & set(client_ids)


@pytest.mark.parametrize(("num_looks", "asked"), [(3, 20), (1000, 2)])
def test_an_evaluation_waits_for_clients_that_work_for_other_runs(
    num_looks: int, asked: int
) -> None:
    """For `coordinator.patience_s` at most; then it asks those that are there."""
    there = There([ClientId(each) for each in range(2)])
    looks = iter(range(num_looks))

    def count_elsewhere() -> int:
        if next(looks, None) is not None:
            return 28
        there.client_ids = [ClientId(each) for each in range(30)]
        return 0

    found = components("evaluation.clients=20", "coordinator.patience_s=10.0")
    draw = draw_of(found, there, num_elsewhere=count_elsewhere)
    assert len(draw(3).client_ids) == asked


def test_where_a_roster_draws_only_the_drawn_evaluate() -> None:
    """Clients with the roster would refuse others. The draw uses the number in the terms."""
    listed = [ClientId(each) for each in range(200)]
    draw = RosterDraw(roster="r", client_ids=listed, factor=2.0)
    found = replace(components("evaluation.clients=20"), draw=draw)
    num_clients, client_ids = draw_of(found, There(listed))(3)
    assert num_clients == 20
    assert set(client_ids) <= set(draw.select(listed, round_num=3, cohort_size=20))
    assert 10 < len(client_ids) <= 20
    assert set(draw_of(found, There(listed))(4).client_ids) != set(client_ids)


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        (["evaluation.clients=1"], "1 clients evaluate, but with secure_aggregation.mode"),
        (
            ["early_stopping.metric=clients/accuracy_p10", "early_stopping.target=0.9"],
            'only the mean over the clients; watch "clients/accuracy_mean"',
        ),
    ],
)
def test_what_a_sum_cannot_tell_is_refused_when_it_is_built(
    overrides: list[str], words: str
) -> None:
    """Control: without secure aggregation, the same settings are accepted."""
    assert components(ENOUGH, *overrides).secure is None
    with pytest.raises(ConfigError, match="(?s)" + words.replace("(", r"\(")):
        components(SECURE, ENOUGH, *overrides)


def test_none_need_evaluate_in_a_sum() -> None:
    assert components(SECURE, ENOUGH, "evaluation.clients=0").secure is not None
