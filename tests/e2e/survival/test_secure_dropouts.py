"""Secure aggregation between processes that are killed, frozen and restarted at every stage.

A coordinator and its clients speak gRPC with mutual TLS, against an active server. The record lists
the clients in each sum, so plain aggregation over the same clients gives the expected model, up to
the bound on fixed-point rounding.
"""

import os
import signal
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from math import inf
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pytest
import torch
from torch import Tensor

from fedlearn import assembly
from fedlearn.algorithms.informed_sampling import NO_STATE, SamplerState
from fedlearn.assembly.plan import build_initial_params
from fedlearn.client.home import Home
from fedlearn.core.clock import VirtualClock
from fedlearn.core.messages import ClientId, Failure
from fedlearn.core.participations import Status
from fedlearn.rounds.plain import PlainCollector
from fedlearn.rounds.records import Outcome, RoundRecord, RunStatus
from fedlearn.rounds.round import RoundPlan, run_round
from fedlearn.secagg.bitmaps import pack_bitmap
from fedlearn.secagg.client import SecureClient
from fedlearn.secagg.messages import ShareRelease, Survivors, encode
from fedlearn.secagg.server import Advertising, Confirming, Masking, Sharing, Unmasking
from fedlearn.secagg.session import Stage
from fedlearn.session.session import ClientSession
from fedlearn.store.runs import StoredRun
from fedlearn.transport.memory import MemoryChannel
from tests.e2e.deployed import HURRY, until_said
from tests.e2e.survival import springs
from tests.e2e.survival.changes import EXPIRE, NOTE_ADVERTS, NOTE_RELEASES
from tests.e2e.survival.harness import HERE, RUN, VotingSite, reporters
from tests.processes import LONG_S, Crash, Function, Launcher, Process, until
from tests.security.liars import harness as liars
from tests.security.liars.gateway import NUM_CLIENTS as NUM_AT_DOOR
from tests.security.liars.gateway import LyingGateway

pytestmark = pytest.mark.slow

#: If one client is lost at each stage, exactly the required eight release their shares.
NUM_CLIENTS, MIN_SURVIVORS = 13, 10
TASK = f"{HERE / 'springs.py'}:{springs.Spring.__name__}"

#: The function that a client calls when the request of a stage has reached it.
STAGES: Mapping[str, Function] = {
    "advertise": SecureClient.advertise,
    "share": SecureClient.share,
    "mask": SecureClient.mask,
    "confirm": SecureClient.confirm,
    "unmask": SecureClient.release,
}
KILL, STOP = signal.SIGKILL, signal.SIGSTOP


def configure(
    site: VotingSite, *, num_rounds: int, num_clients: int, corruption: float = 0.1
) -> None:
    """Configure rounds that ask all clients, of which up to three in ten may be lost."""
    site.configure(
        num_rounds=num_rounds,
        num_clients=num_clients,
        patience_s=2 * LONG_S,  # so that clients that are still starting are not left out
        sections={
            "model": {
                "kind": "python",
                "factory": f"{HERE / 'springs.py'}:{springs.Point.__name__}",
            },
            "stragglers": {
                "over_selection": 1.0,
                "deadline_s": LONG_S,
                "below_minimum": "retry",
                "max_retries": 1,
            },
            "secure_aggregation": {
                "mode": "complete",
                "adversary": "active",
                "corruption": corruption,
                "dropout": 0.3,
                "clip_norm": springs.LONGEST_PULL,  # no update is clipped
                "max_examples": springs.MAX_EXAMPLES,
                "modulus_bits": 24,
                "stage_deadline_s": LONG_S,
            },
        },
    )


@dataclass(frozen=True)
class Drop:
    """A client that is lost at a stage of a session.

    Attributes:
        client_id: The client.
        round_num: The round, counted from 0 at the first one after the client's start.
        stage: The stage whose request it does not answer.
        by: The signal: killed, or frozen.
    """

    client_id: int
    round_num: int
    stage: str
    by: signal.Signals

    @property
    def crash(self) -> Crash:
        """The crash to give to the launcher."""
        function, nth = STAGES[self.stage], self.round_num + 1
        return Crash(f"{self.stage} of round {self.round_num}", function, "before", nth, self.by)


DROPS = [
    Drop(0, 1, "advertise", KILL),
    Drop(3, 1, "share", STOP),
    Drop(6, 1, "mask", KILL),
    Drop(9, 1, "confirm", STOP),
    Drop(12, 1, "unmask", KILL),
    Drop(2, 2, "advertise", STOP),
    Drop(12, 2, "share", KILL),
    Drop(4, 2, "mask", STOP),
    Drop(1, 2, "confirm", KILL),
    Drop(7, 2, "unmask", STOP),
]
#: Rounds of a restarted client count from its restart.
RESTARTED = {12: Drop(12, 0, "share", KILL)}


def populate(site: VotingSite, drops: Sequence[Drop] = ()) -> dict[int, Process]:
    """Enrol all clients and start them."""
    crashes = {drop.client_id: drop.crash for drop in reversed(drops)}
    numbers = range(site.config.straggler_policy().num_wanted)
    for number in numbers:
        site.enrol(number)
    return {number: start(site, number, crashes.get(number)) for number in numbers}


def start(site: VotingSite, number: int, crash: Crash | None = None) -> Process:
    return site.join(number, task=TASK, crash=crash, changes=[NOTE_RELEASES])


def thaw(client: Process) -> None:
    """Continue a frozen client, and treat it as not crashed."""
    client.stem.with_suffix(".crash").unlink()
    client.send(signal.SIGCONT)


def record_of(site: VotingSite, round_num: int, coordinator: Process) -> RoundRecord:
    """Wait for the record of a round and return it."""

    def is_there() -> bool:
        return len(site.rounds()) > round_num or not coordinator.is_running

    until(is_there, told=coordinator.tail)
    return site.rounds()[round_num]


class Release(NamedTuple):
    """Shares that a client has computed for a session's last stage.

    They are the same for every attempt to answer, unless the client releases twice.

    Attributes:
        session: Round and attempt of the session.
        survivors: The clients in its sum.
        digest: Digest of the answer.
    """

    session: tuple[int, int]
    survivors: tuple[int, ...]
    digest: str


def list_releases(site: VotingSite, number: int) -> list[Release]:
    """Return the releases that a client has computed, over all its processes."""
    path = site.stage / f"released-{number}"
    lines = path.read_text().splitlines() if path.exists() else []
    found = []
    for *numbers, digest in map(str.split, lines):
        round_num, attempt, *survivors = map(int, numbers)
        found.append(Release((round_num, attempt), tuple(survivors), digest))
    return found


@dataclass(frozen=True)
class Recorded:
    """A sampler that draws the clients that were in the sum of a round.

    Attributes:
        rounds: The clients of each round.
    """

    rounds: Sequence[Sequence[int]]

    def __call__(
        self,
        num: int,
        *,
        round_num: int,
        attempt: int,
        busy: Collection[ClientId],
        state: SamplerState = NO_STATE,
    ) -> Sequence[ClientId]:
        return [ClientId(each) for each in self.rounds[round_num]]


def replay(site: VotingSite, rounds: Sequence[Sequence[int]]) -> tuple[Tensor, float]:
    """Run plain aggregation over these clients; return the point and the fixed-point error bound.

    A sum of n values is off by at most n steps, and a mean by that times W over the sum of weights.
    Each rounding to float32 adds an ulp, in both runs.
    """
    components = assembly.build_deployment(site.config, data_dir=Path())
    plan = components.secure
    assert plan is not None
    sessions = {
        ClientId(i): ClientSession(ClientId(i), springs.Spring()).handle for i in range(NUM_CLIENTS)
    }
    channel = MemoryChannel(sessions, lambda asked, _: np.zeros(len(asked)), VirtualClock())
    most = max(map(len, rounds))
    policy = replace(components.policy, num_wanted=most, min_reports=1, deadline_s=inf)
    collector = PlainCollector(channel=channel, policy=policy, slab_bytes=0)
    plain = RoundPlan(
        draw=Recorded(rounds),
        policy=policy,
        collector=collector,
        strategy=components.algorithm,
        seed=components.seed,
    )
    params = build_initial_params(components, torch.device("cpu"))
    lane = plan.lanes(params.layout)[0]
    state, bound = plain.init(params), 0.0
    for survivors in rounds:
        state, collected, _ = run_round(state, plain, attempt=0)
        assert collected.count(Status.REPORTED) == len(survivors)
        total = sum(springs.examples(each) for each in survivors)
        error = lane.largest_error(len(survivors))
        bound += error * plan.max_examples / total + 8 * torch.finfo(torch.float32).eps
    return state.params.vector, bound


def final(site: VotingSite) -> Tensor:
    """Return the point at the end of the run."""
    with site.places.open_database() as database:
        run = database.run(RUN)
        assert run.record.status is RunStatus.DONE
        checkpoint = run.load()
    assert checkpoint is not None
    return checkpoint.tensors["params/place"]


def require_plain_model(site: VotingSite) -> None:
    """Check the model against plain aggregation over the recorded clients.

    Control: with one client less in any of the sums, the model is far outside the bound.
    """
    rounds = [reporters(record) for record in site.rounds()]
    assert len(rounds) == site.config.num_rounds
    model = final(site)
    expected, bound = replay(site, rounds)
    assert float((model - expected).abs().max()) <= bound
    assert bound < 1e-3
    for place, survivors in enumerate(rounds):
        left = sorted(survivors, key=springs.examples)[:-1]
        elsewhere, _ = replay(site, [*rounds[:place], left, *rounds[place + 1 :]])
        assert float((model - elsewhere).abs().max()) > 3 * bound


def require_one_release_a_session(site: VotingSite) -> None:
    """Check that no client has computed two different releases in one session.

    It may compute the same one twice: a restarted coordinator asks again, and an answer that was
    not sent by then is dropped.
    """
    for number in range(site.config.straggler_policy().num_wanted):
        sessions = Counter(each.session for each in set(list_releases(site, number)))
        assert max(sessions.values(), default=0) <= 1, number


def test_drop_outs_at_every_stage_leave_the_model_of_plain_aggregation(site: VotingSite) -> None:
    """Thirteen clients, four rounds; in two rounds one client is killed or frozen at each stage.

    A client that is lost before its vector has arrived is not in the sum; a later one is. A stage
    ends only when nothing but lost clients is missing, so a busy machine loses no other client.
    """
    configure(site, num_rounds=4, num_clients=NUM_CLIENTS)
    coordinator = site.serving(changes=[EXPIRE])
    clients = populate(site, DROPS)
    assert reporters(record_of(site, 0, coordinator)) == list(range(NUM_CLIENTS))
    for round_num in (1, 2):
        record = record_of(site, round_num, coordinator)
        dropped = [drop for drop in DROPS if drop.round_num == round_num]
        rows = {row.client_id: row for row in record.participations}
        for drop in dropped:
            assert clients[drop.client_id].has_crashed_itself(), drop
            in_sum = drop.stage in ("confirm", "unmask")
            assert rows[ClientId(drop.client_id)].status is (
                Status.REPORTED if in_sum else Status.LATE
            )
            if not in_sum:
                assert rows[ClientId(drop.client_id)].reason == f"late at the stage `{drop.stage}`"
            if drop.by is STOP:
                thaw(clients[drop.client_id])
        assert len(reporters(record)) >= MIN_SURVIVORS
        for drop in dropped:  # restart them last, since the next round waits for all clients
            if drop.by is KILL:
                again = RESTARTED.get(drop.client_id) if round_num == 1 else None
                clients[drop.client_id].wait()
                clients[drop.client_id] = start(
                    site, drop.client_id, None if again is None else again.crash
                )
    assert coordinator.wait() == 0, coordinator.tail()
    assert [record.attempt for record in site.rounds()] == [0] * 4
    require_plain_model(site)
    require_one_release_a_session(site)


def test_below_the_minimum_nothing_is_given_and_the_round_is_tried_with_fresh_keys(
    site: VotingSite,
) -> None:
    """Four of thirteen are killed after they have got the model; the nine left are one too few."""
    configure(site, num_rounds=2, num_clients=NUM_CLIENTS)
    coordinator = site.serving(changes=[EXPIRE, NOTE_ADVERTS])
    lost = range(NUM_CLIENTS - MIN_SURVIVORS + 1)
    clients = populate(site, [Drop(number, 0, "mask", KILL) for number in lost])
    until_said(coordinator, "secure_aggregation_ended")
    (ended,) = [e for e in coordinator.log() if e["message"] == "secure_aggregation_ended"]
    assert "9 clients are left, min_survivors is 10" in ended["error"]
    assert site.rounds() == []
    assert not any(list_releases(site, number) for number in range(NUM_CLIENTS))
    for number in lost:
        clients[number].wait()
        start(site, number)
    assert coordinator.wait() == 0, coordinator.tail()
    first, second = site.rounds()
    assert (first.attempt, first.outcome) == (1, Outcome.AGGREGATED)
    assert second.attempt == 0
    assert reporters(first) == list(range(NUM_CLIENTS))
    adverts = [line.split() for line in (site.stage / "adverts").read_text().splitlines()]
    assert Counter(tuple(line[:2]) for line in adverts) == dict.fromkeys(
        [("0", "0"), ("0", "1"), ("1", "0")], NUM_CLIENTS
    )
    fresh = [key for line in adverts for key in line[3:]]
    assert len(set(fresh)) == len(fresh) == 3 * 3 * NUM_CLIENTS
    require_plain_model(site)
    require_one_release_a_session(site)


#: In the order of a session.
KILLS = [
    Crash("asked for adverts", Advertising.receive, "after", 2),
    Crash("the roster is drawn up", Advertising.close, "after"),
    Crash("shares come in", Sharing.receive, "after", 3),
    Crash("packets are sorted", Sharing.close, "after"),
    Crash("vectors come in", Masking.receive, "after", 2),
    Crash("the survivors are known", Masking.close, "after"),
    Crash("signatures come in", Confirming.receive, "after", 2),
    Crash("signatures are complete", Confirming.close, "after"),
    Crash("shares are released", Unmasking.receive, "after", 2),
    Crash("before the masks come off", Unmasking.close, "before"),
    Crash("the sum is known", Unmasking.close, "after"),
    Crash("the sum is not committed", StoredRun.commit, "before", 2),
]


#: Kills after which the masked sum is stored, and unmasked by the next coordinator.
IN_THE_LAST_STAGE = KILLS[-4:]


def test_a_coordinator_that_is_killed_at_each_stage_of_a_session_begins_another_one(
    site: VotingSite,
) -> None:
    """Each stage has its round; the next coordinator starts another session with fresh keys.

    Only the last stage is resumed instead, so that no round has a second sum.
    """
    num_clients = 5
    configure(site, num_rounds=len(KILLS) + 1, num_clients=num_clients)
    clients: dict[int, Process] = {}
    for number, kill in enumerate(KILLS):
        armed_by = StoredRun.commit if number else None
        crash = replace(kill, armed_by=armed_by)
        coordinator = site.serving(crash=crash, changes=[NOTE_ADVERTS])
        clients = clients or populate(site)
        assert coordinator.wait() is None, f"{kill.phase}: it went on\n{coordinator.tail()}"
        assert coordinator.has_crashed_itself(), f"{kill.phase}: {coordinator.tail()}"
    last = site.coordinator(changes=[NOTE_ADVERTS])
    assert last.wait() == 0, last.tail()
    rounds = site.rounds()
    assert all(reporters(record) == list(range(num_clients)) for record in rounds)
    assert sum(record.attempt for record in rounds) == len(KILLS)
    adverts = [line.split() for line in (site.stage / "adverts").read_text().splitlines()]
    fresh = [key for line in adverts for key in line[3:]]
    assert len(set(fresh)) == len(fresh)
    require_one_release_a_session(site)
    releases = {(number, each) for number in clients for each in list_releases(site, number)}
    most = Counter(each.session[0] for _, each in releases)
    assert max(most.values()) == num_clients, "no round was summed twice"
    assert site.log().count("masked_sum_goes_on") == len(IN_THE_LAST_STAGE)
    require_plain_model(site)


def test_a_release_that_a_restart_overtakes_is_computed_again_to_the_same_shares(
    site: VotingSite,
) -> None:
    """A client computes its shares while the coordinator is killed, which needs four of five.

    The next coordinator asks in a new attempt, so the client drops the answer that it has not sent.
    """
    configure(site, num_rounds=2, num_clients=5)
    slow, hold = 0, site.stage / "hold-release-0"
    hold.touch()
    coordinator = site.serving(crash=Crash("the sum is known", Unmasking.close, "after"))
    clients = populate(site)
    assert coordinator.wait() is None, coordinator.tail()
    until(lambda: bool(list_releases(site, slow)), told=clients[slow].tail)
    last = site.coordinator()
    until_said(clients[slow], "task_called_off")
    hold.unlink()
    assert last.wait() == 0, last.tail()
    assert last.said("masked_sum_goes_on") == 1
    first, again, _ = list_releases(site, slow)
    assert first == again
    require_one_release_a_session(site)
    # The control: shares for other survivors.
    other = first._replace(survivors=first.survivors[:-1], digest="other")
    with (site.stage / f"released-{slow}").open("a") as stream:
        stream.write(" ".join(map(str, (*other.session, *other.survivors, other.digest))) + "\n")
    with pytest.raises(AssertionError):
        require_one_release_a_session(site)
    require_plain_model(site)


@pytest.mark.parametrize(
    "crash",
    [
        Crash("released, not on disk", SecureClient.release, "after"),
        Crash("released and on disk", Home.hold, "after", 5),
    ],
    ids=["not on disk", "on disk"],
)
def test_a_client_that_is_killed_around_its_release_releases_the_same_once(
    site: VotingSite, crash: Crash
) -> None:
    """After its restart it is asked again, and its answer is the same to the byte.

    One of three may be corrupted, so the shares of all three are needed.
    """
    configure(site, num_rounds=2, num_clients=3, corruption=0.34)
    coordinator = site.serving()
    for number in range(3):
        site.enrol(number)
    clients = [start(site, number, crash if number == 1 else None) for number in range(3)]
    until(clients[1].has_crashed_itself, told=clients[1].tail)
    clients[1].wait()
    start(site, 1)
    assert coordinator.wait() == 0, coordinator.tail()
    assert [record.attempt for record in site.rounds()] == [0, 0]
    assert all(reporters(record) == [0, 1, 2] for record in site.rounds())
    sessions = [each.session for each in list_releases(site, 1)]
    assert sessions.count((0, 0)) == (2 if crash.function is SecureClient.release else 1)
    require_one_release_a_session(site)
    require_plain_model(site)


def test_a_client_that_is_killed_after_its_release_gives_no_share_for_other_survivors(
    launcher: Launcher, tmp_path: Path
) -> None:
    """The coordinator has its shares; after its restart, the client remembers that from its disk.

    It is sent every request again, first as if another client had dropped out and then as before.
    It only repeats its answer to the last request, and refuses the others. The control: a session
    before, and one after.
    """
    victim, task = ClientId(1), f"{Path(liars.__file__)}:{liars.Fixed.__name__}"
    environ = {k: v for k, v in os.environ.items() if not k.startswith("FEDLEARN_")}

    def start(site: LyingGateway, number: int, life: int = 0) -> Process:
        return launcher.launch(
            tmp_path / f"joined-{number}.{life}.log",
            *("join", str(site.folder / f"client-{number}.invitation")),
            *("--task", task, "--home", str(site.home(number))),
            environ=environ | {"OMP_NUM_THREADS": "1"},
            changes=[HURRY],
        )

    with LyingGateway(tmp_path) as site, ExitStack() as stack:
        clients: list[Process] = []
        for number in range(NUM_AT_DOOR):
            site.invite(number)
            clients.append(start(site, number))
            stack.callback(clients[-1].close)
            until(lambda: len(site.registry.clients()) == len(clients), told=clients[-1].tail)
        site.wait_for(NUM_AT_DOOR)
        stand = site.stand(victim=victim)
        everyone = list(range(NUM_AT_DOOR))
        assert stand.require_exact(stand.collect(round_num=0)) == everyone
        given = liars.answer_of(stand.liar.replies[victim, Stage.UNMASK])
        assert isinstance(given, ShareRelease)
        clients[victim].kill()
        again = start(site, victim, life=1)
        stack.callback(again.close)
        until_said(again, "connected")
        honest = stand.liar.requests
        ranks = pack_bitmap(everyone[:-1], size=NUM_AT_DOOR)
        other = replace(honest[Stage.CONFIRM], message=encode(Survivors(ranks=ranks)))
        for stage in reversed(Stage):
            for request in (other, honest[stage]):
                reply = stand.liar.ask(victim, request, deadline_s=LONG_S)
                if request is honest[Stage.UNMASK]:
                    said = liars.answer_of(reply)
                    assert isinstance(said, ShareRelease)
                    assert encode(said) == encode(given)
                else:
                    assert isinstance(reply, Failure)
        assert stand.require_exact(stand.collect(round_num=1)) == everyone
