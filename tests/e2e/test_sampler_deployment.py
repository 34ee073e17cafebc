"""A sampler with state in a deployment whose coordinator is killed."""

import json
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

import fedlearn as fl
from fedlearn.algorithms.informed_sampling import ObservedRound
from fedlearn.core.messages import ClientId
from fedlearn.rounds.records import Outcome
from tests.e2e.deployed import Site, site_in
from tests.processes import Launcher

pytestmark = pytest.mark.slow

NUM_ROUNDS, NUM_CLIENTS = 8, 3
OWN = '''
import json
from pathlib import Path

import fedlearn as fl


class Logged(fl.PowerOfChoiceSampler):
    """Power-of-choice, which writes down what it draws from."""

    def sample(self, available, *, round_num, attempt, state, properties, **rest):
        losses = fl.read_client_values(state, "loss", fl.ids_of(available), default=-1.0)
        line = {"round": round_num, "attempt": attempt, "available": list(available),
                "losses": losses.tolist()}
        with (Path(__file__).parent / "draws.jsonl").open("a") as file:
            file.write(json.dumps(line) + "\\n")
        return super().sample(
            available, round_num=round_num, attempt=attempt, state=state, properties=properties,
            **rest,
        )
'''


@pytest.fixture
def site(launcher: Launcher, tmp_path: Path) -> Iterator[Site]:
    (tmp_path / "own.py").write_text(OWN)
    own = f'sampling="{tmp_path / "own.py"}:Logged", args={{candidates_per_client=2.0}}'
    rounds = (f"num_rounds={NUM_ROUNDS}", "algorithm.weight_by_examples=false")
    settings = (f"cohort={{{own}, num_wanted=2}}", *rounds)
    with site_in(launcher, tmp_path, *settings) as site:
        yield site


def test_a_sampler_draws_by_all_rounds_although_its_coordinator_is_killed(site: Site) -> None:
    """Each draw's state follows from the records of all rounds before it, also of other processes.

    The sampler is the user's own class, named in the configuration.
    """
    first = site.serving()
    for number in range(NUM_CLIENTS):
        site.join(number)
    site.until_round(first, NUM_ROUNDS // 2)
    first.kill()
    second = site.serving()
    assert second.wait() == 0, second.tail()
    with site.database() as database:
        records = list(database.run("federation").rounds())
    assert [record.round_num for record in records] == list(range(NUM_ROUNDS))
    lines = [json.loads(line) for line in (site.folder / "draws.jsonl").read_text().splitlines()]
    # A draw that was not recorded before the kill was drawn again, so the last one counts.
    drawn = {(line["round"], line["attempt"]): line for line in lines}
    sampler = fl.PowerOfChoiceSampler(candidates_per_client=2.0)
    state = sampler.init()
    for record in records:
        line = drawn[record.round_num, record.attempt]
        available = [ClientId(each) for each in line["available"]]
        losses = fl.read_client_values(state, "loss", fl.ids_of(available), default=-1.0)
        np.testing.assert_array_equal(losses, line["losses"])
        state = sampler.observe(
            state,
            ObservedRound(
                round_num=record.round_num,
                is_aggregated=record.outcome is Outcome.AGGREGATED,
                participations=record.participations,
            ),
        )
    # The draws after the kill knew losses of rounds before it.
    after = drawn[NUM_ROUNDS - 1, records[-1].attempt]
    assert max(after["losses"]) > 0.0
