"""Secure aggregation between processes: a coordinator and clients over gRPC, with certificates."""

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import Tensor

from fedlearn.core.participations import Status
from fedlearn.experiment.run import Run
from fedlearn.rounds.records import RoundRecord, RunStatus
from fedlearn.secagg.server import Unmasking
from fedlearn.transport import wire
from tests.e2e.deployed import SECURE, Site, site_in
from tests.processes import LONG_S, Crash, Launcher

NUM_CLIENTS, NUM_ROUNDS = 5, 2
#: A trainer that once kills both processes of its client when it has the model.
DYING = """
import os
import signal
from pathlib import Path

from fedlearn.deployment import part

MARK = Path(__file__).with_name("killed")


class Dying:
    def __init__(self):
        self.trainer = part.trainer()
        self.evaluate = self.trainer.evaluate

    honors = ("epochs", "batch_size", "learning_rate")

    def train(self, tensors, *, context):
        if not MARK.exists():
            MARK.touch()
            for pid in (os.getppid(), os.getpid()):
                os.kill(pid, signal.SIGKILL)
        return self.trainer.train(tensors, context=context)
"""
#: Fixed-point rounding in the first round changes what the second trains on.
ATOL = 1e-4

pytestmark = pytest.mark.slow


@pytest.fixture
def site(launcher: Launcher, tmp_path: Path) -> Iterator[Site]:
    """A deployment that asks five of five clients, of which four must remain."""
    counts = (f"num_rounds={NUM_ROUNDS}", f"cohort.num_wanted={NUM_CLIENTS}")
    with site_in(launcher, tmp_path, *SECURE, *counts) as site:
        yield site


def wait_until_finished(
    site: Site, name: str
) -> tuple[RunStatus, list[RoundRecord], dict[str, Tensor]]:
    with site.database() as database:
        stored = database.run(name)
        weights = Run(stored, None).weights(best=False)
        return stored.record.status, list(stored.rounds()), weights


@pytest.mark.parametrize(
    "changes",
    [(), ('compression={method="shared_random_k", fraction=0.25, error_feedback=true}',)],
    ids=["whole", "compressed"],
)
def test_a_secure_deployment_ends_in_the_model_of_plain_aggregation(
    site: Site, changes: tuple[str, ...]
) -> None:
    """Up to fixed-point errors. The plain simulation has the same clients and data."""
    site.change(*changes)
    coordinator = site.serving()
    clients = [site.join(number) for number in range(NUM_CLIENTS)]
    assert coordinator.wait() == 0, coordinator.tail()
    status, rounds, secure = wait_until_finished(site, "federation")
    assert status is RunStatus.DONE
    told = clients[0].out().splitlines()
    for number in range(1, NUM_ROUNDS + 1):
        assert told.count(f"round {number}: training") == 1
        assert told.count(f"round {number}: summing") > 1
    assert f"round {NUM_ROUNDS}: evaluating" in told
    assert f"round {NUM_ROUNDS + 1}: evaluating" not in told
    assert [len(r.participations) for r in rounds] == [NUM_CLIENTS] * NUM_ROUNDS
    assert all(len({p.num_examples for p in r.participations}) == 1 for r in rounds)
    plain = ("secure_aggregation.mode=off", "engine.transport=memory")
    options = [part for each in (*plain, "name=plain") for part in ("--set", each)]
    site.type("simulate", str(site.file), *options)
    _, in_the_clear, expected = wait_until_finished(site, "plain")
    for each in ("clients/loss_mean", "clients/accuracy_mean"):  # in a sum of the same clients
        found, wanted = (record[-1].metrics[each] for record in (rounds, in_the_clear))
        assert found == pytest.approx(wanted, abs=1e-3)
    assert all(torch.allclose(secure[name], expected[name], atol=ATOL) for name in expected)


def test_a_coordinator_that_is_killed_begins_a_session_of_its_own(site: Site) -> None:
    """What clients remember of the earlier session must not block or answer the new one."""
    site.change("num_rounds=6")
    first = site.serving()
    for number in range(NUM_CLIENTS):
        site.join(number)
    site.until_round(first, 2)
    first.kill()
    second = site.coordinator()
    assert second.wait() == 0, second.tail()
    status, rounds, _ = wait_until_finished(site, "federation")
    assert (status, [r.round_num for r in rounds]) == (RunStatus.DONE, list(range(6)))


def test_a_coordinator_that_is_killed_before_its_commit_opens_the_same_sum(site: Site) -> None:
    """Its clients would not take part in another sum of that round, and do not train again."""
    opened = Crash("the first sum is open", Unmasking.close, when="after")
    first = site.serving(crash=opened)
    for number in range(NUM_CLIENTS):
        site.join(number)
    assert first.wait() is None, first.tail()
    second = site.coordinator()
    assert second.wait() == 0, second.tail()
    status, rounds, _ = wait_until_finished(site, "federation")
    assert (status, [r.attempt for r in rounds]) == (RunStatus.DONE, [1, 0])
    assert [r.participations.num(Status.REPORTED) for r in rounds] == [NUM_CLIENTS] * NUM_ROUNDS
    assert site.log().count("masked_sum_goes_on") == 1
    assert "refused_by_policy" not in site.log()


def test_a_client_that_is_gone_is_left_out_of_the_sum(site: Site) -> None:
    """One of five is killed: rounds wait for it until their deadline, and continue with four."""
    short = [
        "secure_aggregation.stage_deadline_s=10",
        "stragglers.deadline_s=10",
        "coordinator.patience_s=20",  # long enough for a client to start
        "evaluation.every_rounds=0",
        "evaluation.deadline_s=10",
    ]
    site.change("num_rounds=3", *short)
    coordinator = site.serving()
    clients = [site.join(number) for number in range(NUM_CLIENTS)]
    site.until_round(coordinator, 1)
    clients[-1].kill()
    assert coordinator.wait() == 0, coordinator.tail()
    status, rounds, _ = wait_until_finished(site, "federation")
    assert (status, len(rounds)) == (RunStatus.DONE, 3)
    reported = [r.participations.num(Status.REPORTED) for r in rounds]
    assert min(reported) == reported[-1] == NUM_CLIENTS - 1


def test_a_client_that_is_killed_between_download_and_reply_goes_on(site: Site) -> None:
    """It is asked again when it is back, still has the model, and is in the sum of that round."""
    site.change("model.hidden=[4096]", f"stragglers.deadline_s={LONG_S}")
    task = site.folder / "dying.py"
    task.write_text(DYING)
    coordinator = site.serving()
    dying = site.join(0, task=f"{task}:Dying")
    for number in range(1, NUM_CLIENTS):
        site.join(number)
    assert dying.wait() is None, dying.tail()
    (request,) = site.folder.glob("client-0/tasks/*/request")
    assert request.stat().st_size > wire.MAX_INLINE_BYTES
    site.join(0, task=f"{task}:Dying")
    assert coordinator.wait() == 0, coordinator.tail()
    status, rounds, _ = wait_until_finished(site, "federation")
    assert (status, [r.attempt for r in rounds]) == (RunStatus.DONE, [0] * NUM_ROUNDS)
    first = rounds[0].participations
    assert first.num(Status.REPORTED) == len(first)
    assert 0 in [row.client_id for row in first]
    assert "masks_were_ready" in site.log()


def test_a_client_whose_policy_forbids_the_training_says_so_before_secrets_are_shared(
    site: Site,
) -> None:
    """It costs the session one advert; no stage waits for it, and the others continue."""
    (site.folder / "client.toml").write_text("[policy]\nmax_epochs = 0\n")
    # Longer than the last client takes to start.
    site.change("num_rounds=1", "coordinator.patience_s=600")
    coordinator = site.serving()
    for number in range(NUM_CLIENTS - 1):
        site.join(number, "--require-secure-aggregation")
    site.join(NUM_CLIENTS - 1, "--config", "client.toml")
    assert coordinator.wait() == 0, coordinator.tail()
    status, (record,), _ = wait_until_finished(site, "federation")
    assert status is RunStatus.DONE
    assert record.participations.num(Status.REPORTED) == NUM_CLIENTS - 1
    (refused,) = [p for p in record.participations if p.status is Status.FAILED]
    assert refused.client_id == NUM_CLIENTS - 1
    assert refused.reason.startswith("at the stage `advertise`: this client's policy, `max_epochs`")
    lines = [json.loads(each) for each in site.log().splitlines() if "refused_by_policy" in each]
    (line,) = [each for each in lines if each["rule"] == "max_epochs"]
    assert line["asked"] == f"epochs = {site.config.client.epochs}"
    assert lines == [line], "the others evaluate as well, in a sum, which is what they require"
    assert "clients/accuracy_mean" in record.metrics
    assert "clients/accuracy_p10" not in record.metrics
