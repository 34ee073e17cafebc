"""Secure aggregation on a Flower federation with a lying coordinator or SuperLink."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

import pytest
import torch
from flwr.app import ConfigRecord, Message, UserConfig
from flwr.clientapp import ClientApp
from torch import Tensor

from fedlearn.algorithms.collector import CollectedRound, RoundRequest, collect_from
from fedlearn.algorithms.local import LocalSgd
from fedlearn.algorithms.recipes import FedAvg
from fedlearn.algorithms.stragglers import BelowMinimum, StragglerPolicy
from fedlearn.client.flower import client_app
from fedlearn.client.policy import Policy
from fedlearn.core.clock import VirtualClock
from fedlearn.core.codec import decode, encode
from fedlearn.core.messages import ClientId, SecureRequest, SecureStageRequest
from fedlearn.core.params import Params
from fedlearn.core.participations import Status
from fedlearn.errors import DeploymentError
from fedlearn.identity.identity import IDENTITY_FILE, Identity
from fedlearn.identity.rosters import IdentityRoster, KnownKey
from fedlearn.rounds.secure import SecureCollector
from fedlearn.secagg import messages
from fedlearn.secagg.graph import Topology
from fedlearn.secagg.keys import create_signer
from fedlearn.secagg.parameters import Adversary, Assumptions, derive
from fedlearn.secagg.plan import SecurePlan
from fedlearn.training.trainer import LocalEvaluation, LocalResult, TaskControl, TrainContext
from fedlearn.transport.flower import FlowerChannel
from tests.grid import RUN, LocalGrid

NUM_CLIENTS = 5
COHORT = [ClientId(client) for client in range(NUM_CLIENTS)]
VICTIM = ClientId(2)
PARAMS = Params.of(torch.nn.Linear(2, 1))
PLAN = SecurePlan(
    parameters=derive(
        NUM_CLIENTS,
        assumptions=Assumptions(
            adversary=Adversary.ACTIVE_SERVER,
            topology=Topology.COMPLETE,
            corruption=0.1,
            dropout=0.3,
            sigma_bits=40,
            eta_bits=30,
        ),
    ),
    min_survivors=4,
    clip_norm=10.0,
    statistics_norm=10.0,
    max_loss=1.0,
    max_examples=10,
    by_examples=True,
    modulus_bits=32,
)
STRAGGLERS = StragglerPolicy(
    num_wanted=NUM_CLIENTS,
    over_selection=1.0,
    deadline_s=30.0,
    min_reports=4,
    below_minimum=BelowMinimum.FAIL,
    max_retries=0,
)


class Trainer:
    """Adds one to every parameter."""

    honors = ("epochs", "batch_size", "learning_rate")

    def train(self, tensors: Mapping[str, Tensor], *, context: TrainContext) -> LocalResult:
        moved = {name: value + 1.0 for name, value in tensors.items()}
        return LocalResult(tensors=moved, num_examples=3, metrics={}, state={})

    def evaluate(self, tensors: Mapping[str, Tensor], *, control: TaskControl) -> LocalEvaluation:
        return LocalEvaluation(num_examples=1, metrics={})


APP = client_app(lambda _: Trainer(), policy_of=lambda _: Policy())


def pass_through(client: int, message: Message) -> Message:
    return message


def nodes_from(first: int) -> dict[int, int]:
    return {first + client: client for client in COHORT}


@dataclass
class Superlink(LocalGrid):
    """Nodes in this process, and the SuperLink between them and the coordinator.

    Attributes:
        folder_of: Identity folder by client; clients that are missing have none.
        tamper: Replaces a message on its way to a client.
        without_roster: Clients that are not given the roster of the nodes' configuration.
        loses_contexts: Whether the process of a ClientApp dies after each reply, before it hands
            over its context.
        seen: Messages that were sent, by client.
    """

    clock: VirtualClock = field(default_factory=VirtualClock)
    app: ClientApp = APP
    nodes: dict[int, int] = field(default_factory=lambda: nodes_from(100))
    folder_of: dict[int, Path] = field(default_factory=dict)
    tamper: Callable[[int, Message], Message] = pass_through
    without_roster: frozenset[int] = frozenset()
    loses_contexts: bool = False
    seen: dict[int, list[Message]] = field(default_factory=dict)

    def restart_nodes(self) -> None:
        """Restart all nodes under other ids: all state that Flower kept for them is lost."""
        self.nodes = nodes_from(100 + min(self.nodes))
        self.contexts.clear()

    def config_of(self, client: int) -> UserConfig:
        folder = self.folder_of.get(client)
        config = super().config_of(client) | ({} if folder is None else {"identity": str(folder)})
        if client in self.without_roster:
            del config["roster"]
        return config

    def answer(self, client: int, message: Message) -> Message:
        """Return the reply of a client's node to a message."""
        (node_id,) = [each for each, partition in self.nodes.items() if partition == client]
        reply = self.app(message, self.context(node_id))
        if self.loses_contexts:
            del self.contexts[node_id]
        return reply

    def answered(self, client: int, message: Message) -> tuple[float, Message]:
        message = self.tamper(client, message)
        self.seen.setdefault(client, []).append(message)
        return 0.0, self.answer(client, message)


@dataclass
class Coordinator:
    """A coordinator of one run, and its channel.

    Attributes:
        superlink: Connects it with the clients.
        signer: Its identity.
        swapped: Keys that it sends instead of the true ones.
    """

    superlink: Superlink
    signer: Identity = field(default_factory=Identity.create)
    swapped: dict[ClientId, bytes] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.channel = FlowerChannel(
            grid=self.superlink,
            run_id=f"flower-{RUN}",
            clock=VirtualClock(),
            patience_s=30.0,
            coordinator_key=self.signer.public_key,
            start=lambda work: work(),
        )

    def collect(self, *, round_num: int = 0) -> CollectedRound:
        collector = SecureCollector(
            channel=self.channel,
            policy=STRAGGLERS,
            plan=PLAN,
            run_id=bytes(16),
            signer=self.signer,
            directory=lambda: self.channel.identity_keys,
            sends_directory=True,
            stage_deadline_s=20.0,
            num_threads=1,
        )
        collector.available()
        request = RoundRequest(
            round_num=round_num,
            attempt=0,
            params=PARAMS,
            strategy=FedAvg(LocalSgd(epochs=1, batch_size=1, learning_rate=0.1)),
            broadcast={},
            seed=round_num,
        )
        tamper = self.superlink.tamper
        self.superlink.tamper = lambda client, message: self._swap(tamper(client, message))
        try:
            return collect_from(collector, COHORT, request)
        finally:
            self.superlink.tamper = tamper

    def _swap(self, message: Message) -> Message:
        """Replace true keys in a message by the swapped ones."""
        record = message.content.array_records.get("fedlearn.payload")
        request = decode(record["message"].data) if record and self.swapped else None
        if record and isinstance(request, SecureStageRequest) and request.directory:
            lies = {each: key for each, key in self.swapped.items() if each in request.directory}
            told = replace(request, directory={**request.directory, **lies})
            record["message"].data = encode(told)
        return message


def reasons(collected: CollectedRound) -> dict[int, str]:
    """Return, for each client that is not in the sum, the reason."""
    return {
        int(each.client_id): each.reason
        for each in collected.participations
        if each.status is not Status.REPORTED
    }


def all_refuse(collected: CollectedRound, words: str) -> bool:
    found = reasons(collected)
    return len(found) == NUM_CLIENTS and all(words in reason for reason in found.values())


def others_refuse(collected: CollectedRound, words: str) -> bool:
    """Return whether no client is in a sum, and all but the victim gave these words as reason."""
    found = reasons(collected)
    others = [reason for client, reason in found.items() if client != VICTIM]
    return len(found) == NUM_CLIENTS and all(words in reason for reason in others)


def folders(tmp_path: Path) -> dict[int, Path]:
    return {client: tmp_path / f"client-{client}" for client in COHORT}


def roster(path: Path, keys: Mapping[int, Path], *, coordinator: Identity) -> Path:
    """Write a roster of the clients with these identity folders."""
    clients = {
        ClientId(client): KnownKey(
            name=f"site {client}", key=Identity.load_or_create(folder).public_key, num_rotations=0
        )
        for client, folder in keys.items()
    }
    IdentityRoster(coordinator_key=coordinator.public_key, clients=clients).save(path)
    return path


def header_of(message: Message) -> ConfigRecord:
    return message.content.config_records["fedlearn"]


def extract_message(message: Message) -> object:
    """Return the secure-aggregation message inside a Flower message."""
    payload = message.content.array_records["fedlearn.payload"]["message"].data
    request, personal = decode(payload), header_of(message)["personal"]
    assert isinstance(request, SecureRequest)
    assert isinstance(personal, bytes)
    return messages.decode(request.message or personal)


# ---- Whose keys ---------------------------------------------------------------------------


def test_a_coordinator_that_swaps_a_key_is_refused_by_every_client() -> None:
    """The true key was seen in an earlier round, which is the control."""
    coordinator = Coordinator(Superlink())
    assert not reasons(coordinator.collect(round_num=0))
    coordinator.swapped = {VICTIM: create_signer()[1]}
    assert others_refuse(coordinator.collect(round_num=1), f"another key of client {VICTIM}")
    coordinator.swapped = {}
    assert not reasons(coordinator.collect(round_num=2))


def test_keys_in_folders_are_remembered_over_runs_and_restarts(tmp_path: Path) -> None:
    """Flower's state is lost with the nodes, but the files in the folder are not."""
    superlink, signer = Superlink(folder_of=folders(tmp_path)), Identity.create()
    assert not reasons(Coordinator(superlink, signer).collect())
    superlink.restart_nodes()
    lying = Coordinator(superlink, signer, swapped={VICTIM: create_signer()[1]})
    assert others_refuse(lying.collect(round_num=1), f"another key of client {VICTIM}")


def test_without_folders_nodes_that_were_restarted_believe_anew() -> None:
    """The control, and the limit of trust on first use: the nodes have lost the keys they knew."""
    superlink, signer = Superlink(), Identity.create()
    assert not reasons(Coordinator(superlink, signer).collect())
    superlink.restart_nodes()
    lying = Coordinator(superlink, signer, swapped={VICTIM: create_signer()[1]})
    found = reasons(lying.collect(round_num=1))
    assert not any("another key" in reason for reason in found.values())


def test_a_roster_refuses_a_swapped_key_at_first_sight(tmp_path: Path) -> None:
    """Control: the same coordinator when it sends the true key."""
    signer, keys = Identity.create(), folders(tmp_path)
    path = roster(tmp_path / "roster.json", keys, coordinator=signer)
    superlink = Superlink(folder_of=keys, node_config={"roster": str(path)})
    lying = Coordinator(superlink, signer, swapped={VICTIM: create_signer()[1]})
    assert others_refuse(lying.collect(), f"another key of client {VICTIM} (site {VICTIM})")
    assert not reasons(Coordinator(superlink, signer).collect(round_num=1))


def test_a_roster_that_has_another_key_for_this_client_is_refused(tmp_path: Path) -> None:
    """Other clients with this roster would refuse this client."""
    signer, keys = Identity.create(), folders(tmp_path)
    path = roster(tmp_path / "roster.json", keys, coordinator=signer)
    (keys[VICTIM] / IDENTITY_FILE).write_bytes(Identity.create().pem)
    with pytest.raises(DeploymentError, match=f"for client {VICTIM}"):
        Coordinator(Superlink(folder_of=keys, node_config={"roster": str(path)}), signer).collect()


def test_a_roster_of_another_coordinator_is_refused(tmp_path: Path) -> None:
    """Its client ids refer to other clients."""
    keys = folders(tmp_path)
    path = roster(tmp_path / "roster.json", keys, coordinator=Identity.create())
    with pytest.raises(DeploymentError, match="another coordinator"):
        Coordinator(Superlink(folder_of=keys, node_config={"roster": str(path)})).collect()


def test_a_roster_refuses_strangers(tmp_path: Path) -> None:
    """A stranger is a client that the coordinator has made up, or one that joined later."""
    signer, keys = Identity.create(), folders(tmp_path)
    known = {client: folder for client, folder in keys.items() if client != VICTIM}
    path = roster(tmp_path / "roster.json", known, coordinator=signer)
    config: dict[str, bool | float | int | str] = {"roster": str(path)}
    superlink = Superlink(folder_of=keys, node_config=config, without_roster=frozenset([VICTIM]))
    assert others_refuse(Coordinator(superlink, signer).collect(), "not in the roster")


# ---- Whose terms --------------------------------------------------------------------------


def test_a_second_coordinator_of_a_run_is_refused() -> None:
    """The key that was seen first stays pinned."""
    superlink = Superlink()
    assert not reasons(Coordinator(superlink).collect())
    assert all_refuse(Coordinator(superlink).collect(round_num=1), "not signed by the pinned")


def test_a_coordinator_with_another_key_than_the_configured_one_is_refused(tmp_path: Path) -> None:
    """From the first message on, given as text or as a file. Control: the configured key."""
    signer, file = Identity.create(), tmp_path / "coordinator.key"
    file.write_text(f"{signer.public_key.hex()}\n")
    for given in (signer.public_key.hex(), str(file)):
        config: dict[str, bool | float | int | str] = {"coordinator-key": given}
        assert all_refuse(
            Coordinator(Superlink(node_config=config)).collect(), "not signed by the pinned"
        )
        assert not reasons(Coordinator(Superlink(node_config=config), signer).collect())


@pytest.mark.slow
def test_a_coordinator_that_was_believed_once_is_remembered_in_the_folder(tmp_path: Path) -> None:
    """It is remembered after restarts. Without folders, restarted nodes trust any coordinator."""
    for superlink, remembers in (
        (Superlink(folder_of=folders(tmp_path)), True),
        (Superlink(), False),
    ):
        assert not reasons(Coordinator(superlink).collect())
        superlink.restart_nodes()
        found = Coordinator(superlink).collect(round_num=1)
        assert all_refuse(found, "not signed by the pinned") is remembers
        assert bool(reasons(found)) is remembers


# ---- Once a session -----------------------------------------------------------------------


def build_payload(reply: Message) -> bytes:
    return reply.content.array_records["fedlearn.payload"]["message"].data


@pytest.mark.parametrize("in_folder", [True, False])
def test_what_was_answered_is_not_answered_again(tmp_path: Path, *, in_folder: bool) -> None:
    """Every message of a finished session is sent again, with state in a folder or in Flower.

    The last one gets the same shares as before, which reveal nothing new.
    """
    superlink = Superlink(folder_of=folders(tmp_path) if in_folder else {})
    coordinator = Coordinator(superlink)
    assert not reasons(coordinator.collect(round_num=3))
    if in_folder:
        superlink.restart_nodes()
    _, *before, last = superlink.seen[VICTIM]
    assert "SecureReply" in str(decode(build_payload(superlink.answer(VICTIM, last))))
    for message in before:
        reply = superlink.answer(VICTIM, message)
        data = build_payload(reply)
        words = "one release" if isinstance(extract_message(message), messages.SignedTerms) else ""
        assert words in str(decode(data))
        assert "Failure" in str(decode(data))


def test_a_release_is_remembered_over_a_restart_of_the_node(tmp_path: Path) -> None:
    """The same round and attempt are asked for again, under newly signed terms."""
    superlink, signer = Superlink(folder_of=folders(tmp_path)), Identity.create()
    assert not reasons(Coordinator(superlink, signer).collect(round_num=3))
    superlink.restart_nodes()
    again = Coordinator(superlink, signer).collect(round_num=3)
    assert all_refuse(again, "one release a session")


def test_in_a_folder_the_state_is_kept_before_the_reply_leaves(tmp_path: Path) -> None:
    """A process may die before it hands over its context. Control: without a folder it fails."""
    kept = Superlink(folder_of=folders(tmp_path), loses_contexts=True)
    assert not reasons(Coordinator(kept).collect())
    (state,) = (tmp_path / f"client-{VICTIM}" / "state").iterdir()
    assert state.stat().st_mode & 0o777 == 0o600
    lost = Superlink(loses_contexts=True)
    assert len(reasons(Coordinator(lost).collect())) == NUM_CLIENTS


# ---- In transit ---------------------------------------------------------------------------


def flip(client: int, message: Message) -> Message:
    """Flip one bit in the packets for the victim."""
    personal = header_of(message)["personal"]
    if client == VICTIM and isinstance(personal, bytes) and personal:
        header_of(message)["personal"] = personal[:-1] + bytes([personal[-1] ^ 1])
    return message


def test_a_client_whose_packets_were_altered_leaves_the_session() -> None:
    """The others' sum is released without the victim."""
    collected = Coordinator(Superlink(tamper=flip)).collect()
    assert reasons(collected).keys() == {VICTIM}
    assert "altered" in reasons(collected)[VICTIM]
    assert collected.count(Status.REPORTED) == NUM_CLIENTS - 1


def test_a_roster_without_a_folder_is_refused(tmp_path: Path) -> None:
    """Without one, the client's own key would be new in every run, and never in a roster."""
    path = roster(tmp_path / "roster.json", folders(tmp_path), coordinator=Identity.create())
    superlink = Superlink(node_config={"roster": str(path)})
    with pytest.raises(DeploymentError, match=r"identity \(a folder\) is not"):
        Coordinator(superlink).collect()


@pytest.mark.parametrize("key", ["12", "zz" * 32, "no/such/file"])
def test_a_coordinator_key_that_is_none_keeps_the_node_away(key: str) -> None:
    """The error is raised when the node is introduced, not when a round fails."""
    with pytest.raises(DeploymentError, match="coordinator-key"):
        Coordinator(Superlink(node_config={"coordinator-key": key})).collect()


def test_nodes_are_real() -> None:
    """The control of this file: the sum of honest clients is the sum of their updates."""
    collected = Coordinator(Superlink()).collect()
    assert collected.aggregate is not None
    mean = collected.aggregate.lanes["delta"]
    assert torch.allclose(mean, torch.ones_like(mean), atol=1e-4)
