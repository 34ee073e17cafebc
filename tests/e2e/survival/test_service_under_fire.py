"""A service of many runs whose processes are killed at random moments, while people use it.

``SURVIVAL_KILLS`` and ``SURVIVAL_SEED`` set how often and when, such as 50 for a release.
"""

import json
import os
import signal
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from threading import Event, Thread

import numpy as np
import pytest

from fedlearn.client.bundle_store import Approval
from fedlearn.core.clock import SystemClock
from fedlearn.deployment.hosted_run import HostedRun, keep_bundle
from fedlearn.errors import DeploymentError, StoreError
from fedlearn.gateway.exchanges import Exchanges, OfferedBundle
from fedlearn.gateway.server import Gateway
from fedlearn.rounds.scheduling import QueueState
from fedlearn.secagg.server import Advertising, Masking, Sharing, Unmasking
from fedlearn.store.journal import StoredJournal
from fedlearn.store.lease import Lease
from fedlearn.store.ledger import StoredLedger
from fedlearn.store.masked_sum import MaskedSumFile
from fedlearn.store.queue import RunQueue
from fedlearn.store.runs import Database, StoredRun
from tests.e2e.deployed import until_said
from tests.e2e.survival.many_runs import KINDS, NUM_CLIENTS, PLAIN, SECURE, ServiceSite
from tests.e2e.survival.runs_audit import audit_all
from tests.processes import Crash, Function, Launcher, Process

pytestmark = pytest.mark.slow

NUM_KILLS = int(os.environ.get("SURVIVAL_KILLS", "6"))
SEED = int(os.environ.get("SURVIVAL_SEED", "0"))

#: Longest time from when a service serves, or starts, to its kill, in seconds.
_LIFE_S, _START_S = 6.0, 5.0
#: Longest time in which a service has to reach the point where it kills itself.
_ARMED_S = 15.0
#: Where a service kills itself, if it is not killed at a random moment.
_PLACES: Sequence[Function] = (
    RunQueue.start,
    RunQueue.finish,
    Database.create,
    HostedRun.deploy,
    keep_bundle,
    Lease.try_acquire,
    Gateway.open_run,
    Gateway.retire_run,
    StoredJournal.open,
    StoredLedger.charge,
    StoredRun.commit,
    OfferedBundle.encode_notice,
    OfferedBundle.is_run_by,
    Exchanges.open,
    Exchanges.close,
    Advertising.close,
    Sharing.close,
    Masking.close,
    MaskedSumFile.save,
    MaskedSumFile.clear,
    Unmasking.receive,
    Unmasking.close,
)


@dataclass
class Operators:
    """People who submit, cancel and retry runs, and approve bundles, until they stop.

    Attributes:
        done: How often each command succeeded, or was refused.
    """

    site: ServiceSite
    random: np.random.Generator
    done: Counter[str] = field(default_factory=Counter)

    def __post_init__(self) -> None:
        self._stopped, self._error = Event(), list[BaseException]()
        self._thread = Thread(target=self._work, daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """End after the present command."""
        self._stopped.set()
        self._thread.join()
        for error in self._error:
            raise error

    def _work(self) -> None:
        try:
            while not self._stopped.wait(self.random.uniform(0.2, 1.5)):
                self._act()
        except BaseException as error:  # noqa: BLE001 - raised where they stop
            self._error.append(error)

    def _act(self) -> None:
        states = self.site.states()
        waiting = sum(not state.is_over for state in states.values())
        if waiting < 2 * len(KINDS):
            kind = KINDS[len(self.site.submitted) % len(KINDS)]
            self._submit_by_command(kind) if self.random.random() < 0.3 else self._submit(kind)
        elif self.random.random() < 0.3:
            names = [name for name, state in states.items() if not state.is_over]
            self._change("cancel", str(self.random.choice(names)))
        for name, state in states.items():
            if state is QueueState.CANCELLED and self.random.random() < 0.5:
                self._change("retry", name)
        for number, digest in self.site.list_undecided():
            self._decide(number, digest)

    def _decide(self, number: int, digest: str) -> None:
        """Let an owner approve a bundle, or first refuse it, by a command that is killed or not."""
        kind = self.random.random()
        if kind < 0.2:
            self.site.decide(number, digest, Approval.REFUSED)
            self.done["refuse"] += 1
        elif kind < 0.3:
            home = str(self.site.home(number).folder)
            command = self.site.start("typed", "approve", home, digest)
            self._stopped.wait(self.random.uniform(0.1, 3.0))
            command.kill()
            self.done["approve, killed"] += 1
        if kind >= 0.1:
            self.site.decide(number, digest, Approval.APPROVED)
            self.done["approve"] += 1

    def _submit(self, kind: str) -> None:
        self.site.submit(kind, priority=int(self.random.integers(3)))
        self.done["submit"] += 1

    def _submit_by_command(self, kind: str) -> None:
        """Kill the command at a random moment; its operator then submits once more."""
        name, file = self.site.new_name(kind), self.site.write_experiment(kind)
        options = ["--name", name, "--config", str(self.site.file)]
        if kind in self.site.bundled:
            options += ["--set", f"client.bundle={self.site.pack(name)}"]
        command = self.site.start("typed", "submit", str(file), *options)
        self._stopped.wait(self.random.uniform(0.1, 3.0))
        command.kill()
        self.site.submit(kind, name=name)
        self.done["submit, killed"] += 1

    def _change(self, command: str, name: str) -> None:
        with self.site.queue() as queue:
            try:
                (queue.cancel if command == "cancel" else queue.retry)(name)
                self.done[command] += 1
            except (DeploymentError, StoreError):  # its state has changed meanwhile
                self.done[f"{command}, refused"] += 1


def wait_for_death(service: Process, crash: Crash | None, random: np.random.Generator) -> str:
    """Kill a service, unless it kills itself; return how it died."""
    if crash is not None:
        _wait(service, _ARMED_S)
    elif random.random() < 0.3:
        _wait(service, random.uniform(0.0, _START_S))
    else:
        until_said(service, "serving")
        _wait(service, random.uniform(0.0, _LIFE_S))
    if service.has_crashed_itself():
        service.wait()
        return "killed itself"
    assert service.is_running, service.tail()
    service.kill()
    return "killed" if service.said("serving") else "killed, starting"


def _wait(service: Process, seconds: float) -> None:
    clock = SystemClock()
    ends_s = clock.now_s() + seconds
    while service.is_running and clock.now_s() < ends_s:
        clock.sleep(0.02)


def draw_crash(random: np.random.Generator) -> Crash | None:
    """Draw where a service kills itself; ``None``: nowhere."""
    if random.random() < 0.4:
        return None
    place, nth = _PLACES[int(random.integers(len(_PLACES)))], int(random.integers(1, 4))
    return Crash(place.__qualname__, place, "before" if random.random() < 0.5 else "after", nth)


@pytest.fixture(params=["sqlite", "postgresql"])
def burning(
    request: pytest.FixtureRequest, launcher: Launcher, tmp_path: Path
) -> Iterator[ServiceSite]:
    """A service, not started yet."""
    url = request.getfixturevalue("postgresql_url") if request.param == "postgresql" else None
    with ServiceSite(launcher, tmp_path, store_url=url, bundled=(PLAIN, SECURE)) as site:
        site.configure_service()
        yield site


def test_a_service_under_fire_loses_no_run_and_runs_none_twice(burning: ServiceSite) -> None:
    """Three runs are at work, two of them with a bundle that owners approve, and others wait.

    Clients are killed as well.
    """
    site, random, deaths = burning, np.random.default_rng(SEED), Counter[str]()
    service = site.start_serving()
    clients = site.populate()
    operators = Operators(site, np.random.default_rng(SEED + 1))
    crash: Crash | None = None
    for _ in range(NUM_KILLS):
        deaths[wait_for_death(service, crash, random)] += 1
        if random.random() < 0.2:
            number = int(random.integers(NUM_CLIENTS))
            clients[number].kill()
            clients[number] = site.join(number)
            deaths["client"] += 1
        crash = draw_crash(random)
        service = site.serve(crash=crash)
    operators.stop()
    service.kill()
    last = site.start_serving()
    site.until_all_done(last)
    last.send(signal.SIGTERM)
    assert last.wait() == 0, last.tail()
    assert "the log is whole" in site.type("audit-log", "--verify", "--config", str(site.file))
    figures = audit_all(site) | deaths | operators.done
    (site.folder / "figures.json").write_text(json.dumps(figures))
