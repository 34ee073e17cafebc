"""A service of many runs whose processes a test kills.

Three kinds of runs are at work: plain ones, whose clients vote; secure ones and private ones, whose
clients pull a point. Some ship their trainer as a bundle, which each client's owner approves.
:mod:`tests.e2e.survival.runs_audit` checks every run that was submitted.
"""

import json
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from torch import Tensor

from fedlearn import assembly
from fedlearn.client.bundle_policy import BundlePolicy
from fedlearn.client.bundle_store import Approval, BundleStore
from fedlearn.client.task_folder import TaskFolder
from fedlearn.config import Config, for_service, from_mapping, render
from fedlearn.config.serving import load_service
from fedlearn.core.clock import SystemClock
from fedlearn.errors import StoreUnavailable
from fedlearn.experiment.simulate import new_record
from fedlearn.identity.bundles import Bundle
from fedlearn.rounds.scheduling import QueueState, Submission
from fedlearn.store.queue import RunQueue
from fedlearn.store.queue_rows import NameTaken
from fedlearn.store.studies import Consent, NewStudy, StudyStore
from fedlearn.training.trainer import LocalEvaluation, LocalResult, TaskControl, TrainContext
from tests.addresses import free_addresses
from tests.bundles import build
from tests.e2e.deployed import SMALL, until_said
from tests.e2e.survival import ballots, springs
from tests.e2e.survival.harness import HERE, VotingSite
from tests.processes import LONG_S, Crash, Process, until

NUM_CLIENTS = 4
TASK = f"{HERE / 'many_runs.py'}:Anyone"
TTL_S = 2.0
STUDY = "ward"

PLAIN, SECURE, PRIVATE = "plain", "secure", "private"
KINDS = (PLAIN, SECURE, PRIVATE)
NUM_ROUNDS: Mapping[str, int] = {PLAIN: 12, SECURE: 6, PRIVATE: 10}

#: Any: sections of a configuration.
_POINT: dict[str, Any] = {
    "kind": "python",
    "factory": f"{HERE / 'springs.py'}:{springs.Point.__name__}",
}
_EVERYBODY: dict[str, Any] = {
    "over_selection": 1.0,
    "deadline_s": "none",
    "min_reports": NUM_CLIENTS,
    "below_minimum": "retry",
    "max_retries": 20,
}
_SECTIONS: Mapping[str, dict[str, Any]] = {
    PLAIN: {
        "model": {
            "kind": "python",
            "factory": f"{HERE / 'ballots.py'}:{ballots.Ballots.__name__}",
            "args": {"ballast": 1000},
        },
        "stragglers": _EVERYBODY,
    },
    SECURE: {
        "model": _POINT,
        # Killed clients may be left out of a sum, so that both cases occur.
        "stragglers": _EVERYBODY | {"deadline_s": 30.0, "min_reports": 3},
        "secure_aggregation": {
            "mode": "complete",
            "adversary": "active",
            "corruption": 0.0,
            "dropout": 0.25,
            "clip_norm": springs.LONGEST_PULL,  # no update is clipped
            "max_examples": springs.MAX_EXAMPLES,
            "modulus_bits": 40,
            "stage_deadline_s": 30.0,
        },
    },
    PRIVATE: {
        "model": _POINT,
        "stragglers": _EVERYBODY,
        "cohort": {"sampling": "poisson", "num_wanted": NUM_CLIENTS},
        "algorithm": {"name": "fedavg", "weight_by_examples": False},
        "privacy": {
            "mode": "central",
            "clip_norm": 1.0,
            "noise_multiplier": 1.0,
            "target_delta": 1e-3,
            "num_users": NUM_CLIENTS,
        },
    },
}


class Anyone:
    """A trainer that votes or pulls, as the model asks."""

    num_examples = 1
    device = "cpu"

    honors = ("epochs", "batch_size", "learning_rate")

    def train(self, tensors: Mapping[str, Tensor], *, context: TrainContext) -> LocalResult:
        trainer = ballots.Voter() if "votes" in tensors else springs.Spring()
        return trainer.train(tensors, context=context)

    def evaluate(self, tensors: Mapping[str, Tensor], *, control: TaskControl) -> LocalEvaluation:
        trainer = ballots.Voter() if "votes" in tensors else springs.Spring()
        return trainer.evaluate(tensors, control=control)


#: The trainer of a bundle, which sees no other file of the tests. It can be held: see Voter.
_BUNDLED = (
    Path(springs.__file__).read_text()
    + f"""
import os, time
from pathlib import Path

class Trainer(Spring):
    num_examples = 1

    def train(self, tensors, *, context):
        held = Path(os.environ["{ballots.STAGE}"], f"hold-{{context.client_id}}")
        if held.exists():
            context.control.save({{"began": torch.ones(1)}})
        while held.exists():
            context.control.check()
            time.sleep(0.02)
        if "votes" not in tensors:
            return super().train(tensors, context=context)
        votes = tensors["votes"].clone()
        votes[context.round_num, context.client_id] += 1.0
        return LocalResult(
            tensors={{**tensors, "votes": votes}},
            num_examples=1,
            metrics={{"loss": 0.0}},
            state={{}},
        )
"""
)


@dataclass
class ServiceSite(VotingSite):
    """A service of many runs, its clients and its queue.

    Attributes:
        bundled: The kinds of runs that ship a bundle, each run its own version.
        submitted: The kind of each submitted run, by name.
    """

    task: str = TASK
    bundled: Collection[str] = ()
    submitted: dict[str, str] = field(default_factory=dict)
    _num_named: int = 0
    _trees: dict[str, Mapping[str, Any]] = field(default_factory=dict)

    @property
    def file(self) -> Path:
        return self.folder / "service.toml"

    def configure_service(
        self,
        *,
        max_concurrent_runs: int = len(KINDS),
        listening: Sequence[str] = (),
        public_addresses: Sequence[str] = (),
        home: Path | None = None,
    ) -> None:
        """Write ``service.toml``.

        Args:
            max_concurrent_runs: Most runs at work at a time.
            listening: The gateway's and the monitors' address; empty: free ones.
            public_addresses: Addresses that clients are told; empty: the gateway's.
            home: Folder of runs and keys; ``None``: the site's.
        """
        home, (address, http_address) = home or self.folder, listening or free_addresses(2)
        self.configure(
            num_rounds=1,
            num_clients=NUM_CLIENTS,
            runs_dir=home / "runs",
            folder=str(home / "coordinator"),
            address=address,
            http_address=http_address,
        )
        public = f"public_addresses = {json.dumps(list(public_addresses))}"
        self.file.write_text(
            f"""
name = "fire"

[service]
max_concurrent_runs = {max_concurrent_runs}

[store]
runs_dir = "{home / "runs"}"

[coordinator]
address = "{address}"
http_address = "{http_address}"
folder = "{home / "coordinator"}"
lease_ttl_s = {TTL_S}
shutdown_grace_s = 2.0
{public if public_addresses else ""}
"""
        )

    @property
    def listening(self) -> tuple[str, str]:
        """Addresses of the gateway and for monitors."""
        return self.config.coordinator.address, self.config.coordinator.http_address

    def serve(self, *options: str, file: Path | None = None, crash: Crash | None = None) -> Process:
        """Start a service, or a standby with another file."""
        command = ("serve", str(file or self.file), "--json", *options)
        return self.start("service", *command, crash=crash)

    def start_serving(self, *options: str) -> Process:
        """Start a service and return when its gateway is open."""
        process = self.serve(*options)
        until_said(process, "serving")
        return process

    def populate(self) -> list[Process]:
        """Enrol all clients, which needs a service that serves, and start them."""
        for number in range(NUM_CLIENTS):
            self.enrol(number)
        return [self.join(number) for number in range(NUM_CLIENTS)]

    def _own(self, options: Sequence[str]) -> Sequence[str]:
        """Let clients that have sent masked updates also send readable ones, to other runs."""
        path = self.folder / "policy.toml"
        if not path.exists():  # a client that starts may be reading it
            path.write_text(
                f'[policy]\nstudies = ["{STUDY}"]\n'
                f"{SMALL}stays_required = false\n"
                # In whatever container tests run.
                '[policy.bundles]\nisolation = "where possible"\n'
                f'data = ["{self.stage}"]\nvariables = ["{ballots.STAGE}"]\n'
            )
        return (*options, "--config", str(path))

    # The queue

    def submit(self, kind: str, *, name: str = "", num_rounds: int = 0, **about: Any) -> str:
        """Queue a run of this kind and return its name; no-op if the queue has it already."""
        name = name or self.new_name(kind)
        tree = self._tree(kind)
        config = {**tree, "name": name, "num_rounds": num_rounds or tree["num_rounds"]}
        if kind in self.bundled:
            path = self.pack(name)
            config["client"] = {**config["client"], "bundle": str(path)}
        with self.queue() as queue:
            try:
                queue.submit(Submission(name=name, config=config, start_from={}, **about))
            except NameTaken:
                assert name not in self.submitted
        self.submitted[name] = kind
        return name

    def new_name(self, kind: str) -> str:
        self._num_named += 1
        return f"{kind}-{self._num_named}"

    def write_experiment(self, kind: str) -> Path:
        """Write the configuration of a kind of run, for ``fedlearn submit``."""
        path = self.folder / f"{kind}.toml"
        if not path.exists():
            path.write_text(render(self._experiment(kind)))
        return path

    def create_study(self) -> None:
        """Create the study to which all clients consent; they must be enrolled."""
        with self.database() as database:
            studies = StudyStore(database, SystemClock())
            studies.create(NewStudy(name=STUDY))
            studies.invite(STUDY, [f"client-{number}" for number in range(NUM_CLIENTS)])

    def count_consents(self) -> int:
        """Return how many clients consent to the study."""
        with self.database() as database:
            members = StudyStore(database, SystemClock()).find(STUDY).members
        return sum(each.consent == Consent.GIVEN for each in members)

    # Bundles

    def pack(self, name: str) -> Path:
        """Write the bundle of a run, and return its file; it is the same each time."""
        path = self.folder / f"{name}.bundle"
        if not path.exists():
            path.write_bytes(self._build_bundle(name).content)
        return path

    def _build_bundle(self, name: str) -> Bundle:
        about = f"run = {json.dumps(name)}\n"
        return build(self.folder / "bundles" / name, code=_BUNDLED, parameters=about)

    def bundles_of(self, number: int) -> BundleStore:
        """Return the bundles that a client was sent."""
        return BundleStore(self.home(number).folder / "bundles")

    def has_begun_bundle(self, number: int) -> bool:
        """Whether the bundle of a client that is held has begun to train."""
        tasks = (self.home(number).folder / "tasks").glob("*")
        return any(b"began" in TaskFolder(each).load_checkpoint() for each in tasks)

    def list_undecided(self) -> list[tuple[int, str]]:
        """List the bundles that wait for the decision of a client's owner, with the client."""
        stores = {number: self.bundles_of(number) for number in range(NUM_CLIENTS)}
        return [
            (number, digest)
            for number, store in stores.items()
            for digest in store.list_digests()
            if not (store.folder / f"{digest}.json").exists()
        ]

    def decide(self, number: int, digest: str, approval: Approval) -> None:
        """Decide as a client's owner, without the seconds that the command takes."""
        self.bundles_of(number).decide(digest, approval, reason="", clock=SystemClock())

    def approve_all(self) -> None:
        """Approve each bundle that has arrived and that its client's owner has not approved."""
        for number in range(NUM_CLIENTS):
            store = self.bundles_of(number)
            for digest in store.list_digests():
                decision = store.read_decision(store.load(digest), BundlePolicy())
                if not decision.is_approved:
                    self.decide(number, digest, Approval.APPROVED)

    @contextmanager
    def queue(self) -> Iterator[RunQueue]:
        with self.database() as database:
            yield RunQueue(database, SystemClock())

    def states(self) -> dict[str, QueueState]:
        """Return the states of the runs by name."""
        # The server ends a transaction that waits for this process too long, as on a busy machine.
        with suppress(StoreUnavailable):
            return self._read_states()
        return self._read_states()

    def _read_states(self) -> dict[str, QueueState]:
        with self.queue() as queue:
            return {each.name: each.state for each in queue.list()}

    def num_rounds(self, name: str) -> int:
        """Return the number of committed rounds of a run; 0 if it has not begun."""
        with self.database() as database:
            if not any(run.name == name for run in database.runs()):
                return 0
            return len(database.run(name).rounds())

    def until_rounds(self, num_more: int, process: Process) -> None:
        """Wait until each run has so many more rounds than now, or is done."""
        before = {name: self.num_rounds(name) for name in self.submitted}

        def have_gone_on() -> bool:
            states = self.states()
            return all(
                states[name] is QueueState.DONE or self.num_rounds(name) >= num_rounds + num_more
                for name, num_rounds in before.items()
            )

        until(have_gone_on, told=process.tail)

    def until_all_done(self, service: Process) -> None:
        """Wait until every run of the queue is done; cancelled ones are retried.

        One may be cancelled only now, if its service was killed before it ended the run.
        """

        def are_done() -> bool:
            self.approve_all()
            states = self.states()
            for name in [each for each, state in states.items() if state is QueueState.CANCELLED]:
                with self.queue() as queue:
                    queue.retry(name)
            failed = [name for name, state in states.items() if state is QueueState.FAILED]
            assert not failed, f"{self.explain(failed)}\n{service.tail()}"
            assert service.is_running, service.tail()
            return all(state is QueueState.DONE for state in states.values())

        until(are_done, within_s=3 * LONG_S, told=lambda: f"{self.states()}\n{service.tail()}")

    def explain(self, names: Sequence[str]) -> dict[str, str]:
        with self.queue() as queue:
            return {name: queue.find(name).reason for name in names}

    def _experiment(self, kind: str) -> Config:
        values = {
            "num_rounds": NUM_ROUNDS[kind],
            "data": {"partition": {"kind": "iid", "num_clients": NUM_CLIENTS}},
            "cohort": {"num_wanted": NUM_CLIENTS},
            "evaluation": {"clients": 0},
            "coordinator": {"patience_s": LONG_S},
            **_SECTIONS[kind],
        }
        return from_mapping(values, source=kind)

    def _tree(self, kind: str) -> Mapping[str, Any]:
        if kind not in self._trees:
            config = for_service(self._experiment(kind), load_service(self.file))
            components = assembly.build_deployment(config, data_dir=self.folder)
            self._trees[kind] = new_record(components, extra={}).config
        return self._trees[kind]
