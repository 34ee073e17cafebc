"""Clients behind a transport, in place of in-memory sessions.

The run is a simulation whose sessions belong to deployed clients: Flower's nodes with
fedlearn's ClientApp, or clients of a gRPC gateway on the loopback, each on its own thread. A
coordinator that stops leaves them running, with their state.
"""

import asyncio
import threading
from collections.abc import Callable, Iterator, Mapping, MutableMapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, cast
from unittest.mock import patch

import structlog
from torch import Tensor

from fedlearn.algorithms.collector import Collector
from fedlearn.assembly import simulated_plan
from fedlearn.assembly.client_link import ClientLink, Identities, build_collector
from fedlearn.client.events import AgentEvent, EventKind
from fedlearn.client.flower import client_app
from fedlearn.client.home import Home
from fedlearn.client.options import RuntimeOptions
from fedlearn.client.policy import Policy, SecureAggregationPolicy
from fedlearn.client.runtime import Runtime
from fedlearn.core.clock import SystemClock, VirtualClock
from fedlearn.core.messages import ClientId
from fedlearn.deployment.hosted_run import load_identity_keys
from fedlearn.identity.identity import Identity
from fedlearn.simulation.sessions import SessionCollector, SessionStates
from fedlearn.store.patience import Patience
from fedlearn.testing.local_gateway import LocalGateway
from fedlearn.training.trainer import (
    LocalEvaluation,
    LocalResult,
    LocalTrainer,
    TaskControl,
    TrainContext,
)
from fedlearn.transport.base import Channel, Exchange
from fedlearn.transport.flower import FlowerChannel
from fedlearn.transport.flower.node_store import open_node_store
from fedlearn.transport.flower.records import format_run_id
from fedlearn.transport.memory import MemoryChannel
from tests.grid import LocalGrid, joined
from tests.oracle.configuration import NUM_CLIENTS, Configuration
from tests.oracle.reference.policies import LEAST_SUMMED

LONG_S = 60.0
#: Flower's number of the first client's node.
FIRST_NODE = 1000

#: In a simulation clients report metrics in the clear, under a coordinator in a secure sum.
POLICY = Policy(
    secure_aggregation=SecureAggregationPolicy(min_cohort=LEAST_SUMMED, stays_required=False)
)

#: Builds the trainer of a client, as its owner would.
MakeTrainer = Callable[[int], LocalTrainer]


@contextmanager
def reach_clients(c: Configuration, make_trainer: MakeTrainer, folder: Path) -> Iterator[None]:
    """Make simulations over sessions use deployed clients within a block."""
    with ExitStack() as stack:
        clients: Nodes | Members = (
            Nodes(make_trainer)
            if c.place == "flower"
            else stack.enter_context(members(make_trainer, folder))
        )
        stack.enter_context(patch.object(simulated_plan, "_build_sessions", clients.sessions))
        yield


@dataclass
class Nodes:
    """The nodes of a Flower federation, in this process."""

    make_trainer: MakeTrainer
    signer: Identity = field(default_factory=Identity.create)
    grid: LocalGrid = field(init=False)

    def __post_init__(self) -> None:
        app = client_app(lambda node: self.make_trainer(node.client_id), policy_of=lambda _: POLICY)
        nodes = {FIRST_NODE + client: client for client in range(NUM_CLIENTS)}
        self.grid = LocalGrid(VirtualClock(), app, nodes)

    def sessions(self, simulation: Any, *_: object) -> tuple[Channel, Collector]:
        """Build a channel to them and a collector, like ``simulated_plan._build_sessions``."""
        run_id = format_run_id(self.grid.context(FIRST_NODE))
        channel = FlowerChannel(
            grid=self.grid,
            clock=self.grid.clock,
            run_id=run_id,
            patience_s=LONG_S,
            coordinator_key=self.signer.public_key,
            start=lambda work: work(),
        )
        joined(channel, NUM_CLIENTS)
        identities = Identities.of(
            run_id, signer=self.signer, directory=lambda: channel.identity_keys
        )
        states = States(self._state, self._keep)
        return _sessions(simulation, channel, states, identities)

    def _state(self, client_id: ClientId) -> bytes:
        with open_node_store(self.grid.context(FIRST_NODE + client_id)) as store:
            return store.state

    def _keep(self, client_id: ClientId, state: bytes) -> None:
        with open_node_store(self.grid.context(FIRST_NODE + client_id)) as store:
            store.keep(state)


@dataclass
class Members:
    """Clients of a gRPC gateway, each a runtime on its own thread."""

    local: LocalGateway
    homes: Sequence[Home]

    def sessions(self, simulation: Any, *_: object) -> tuple[Channel, Collector]:
        """Build a channel to them and a collector, like ``simulated_plan._build_sessions``."""
        channel = self.local.gateway.channel()
        patiently = Patience(
            clock=SystemClock(), give_up_s=LONG_S, log=structlog.get_logger(__name__)
        )
        identities = Identities.of(
            self.local.run_id,
            signer=self.local.authority.signer,
            directory=partial(load_identity_keys, self.local.registry, patiently=patiently),
        )
        run_id = self.local.run_id
        states = States(
            lambda client_id: self.homes[client_id].load_state(run_id),
            lambda client_id, state: self.homes[client_id].save_state(run_id, state),
        )
        return _sessions(simulation, channel, states, identities)


@contextmanager
def members(make_trainer: MakeTrainer, folder: Path) -> Iterator[Members]:
    """Open a gateway and let all clients join it in order, so that ids equal numbers."""
    with LocalGateway(folder) as local, ExitStack() as stack:
        homes = [Home(folder / f"home-{number}") for number in range(NUM_CLIENTS)]
        for number, home in enumerate(homes):
            home.set_consent(granted=True)
            path = folder / f"{number}.invitation"
            local.create_invitation(f"client-{number}").save(path)
            stack.enter_context(_runs(home, path, make_trainer(number)))
        local.wait_for(NUM_CLIENTS)
        yield Members(local, homes)


@contextmanager
def _runs(home: Home, invitation: Path, trainer: LocalTrainer) -> Iterator[None]:
    is_connected = threading.Event()

    def on_event(event: AgentEvent) -> None:
        if event.kind is EventKind.CONNECTED:
            is_connected.set()

    options = RuntimeOptions(home=home.folder, trainer="", invitation=invitation, policy=POLICY)
    loops = list[tuple[Runtime, asyncio.AbstractEventLoop]]()

    async def run() -> None:
        runtime = Runtime(options, InTurns(trainer), on_event=on_event)
        loops.append((runtime, asyncio.get_running_loop()))
        await runtime.run()

    thread = threading.Thread(target=asyncio.run, args=(run(),))
    thread.start()
    try:
        assert is_connected.wait(LONG_S)
        yield
    finally:
        for runtime, loop in loops:
            loop.call_soon_threadsafe(runtime.stop)
        thread.join(LONG_S)


class InTurns:
    """Wraps a client's trainer where several clients share a process.

    torch's generator belongs to the process, so clients take turns to train.
    """

    _turn = threading.Lock()

    def __init__(self, trainer: LocalTrainer) -> None:
        self._trainer, self.honors = trainer, trainer.honors
        self.own_transforms = getattr(trainer, "own_transforms", ())

    def train(self, tensors: Mapping[str, Tensor], *, context: TrainContext) -> LocalResult:
        """Train while no other client does."""
        with self._turn:
            return self._trainer.train(tensors, context=context)

    def evaluate(self, tensors: Mapping[str, Tensor], *, control: TaskControl) -> LocalEvaluation:
        """Evaluate while no other client does."""
        with self._turn:
            return self._trainer.evaluate(tensors, control=control)


@dataclass
class States(MutableMapping[ClientId, bytes]):
    """The encoded states of the clients that have one."""

    read: Callable[[ClientId], bytes]
    write: Callable[[ClientId, bytes], None]

    def __getitem__(self, client_id: ClientId) -> bytes:
        if state := self.read(client_id):
            return state
        raise KeyError(client_id)

    def __setitem__(self, client_id: ClientId, state: bytes) -> None:
        self.write(client_id, state)

    def __delitem__(self, client_id: ClientId) -> None:
        self.write(client_id, b"")

    def __iter__(self) -> Iterator[ClientId]:
        return (each for each in map(ClientId, range(NUM_CLIENTS)) if self.read(each))

    def __len__(self) -> int:
        return sum(1 for _ in self)


@dataclass
class KeepingChannel:
    """A channel to clients, together with their states."""

    inner: Channel
    states: States

    def available(self) -> Sequence[ClientId]:
        """Return the available clients."""
        return self.inner.available()

    def open(self, *, deadline_s: float) -> Exchange:
        """Open an exchange."""
        return self.inner.open(deadline_s=deadline_s)


def _sessions(
    simulation: Any, channel: Channel, states: States, identities: Identities
) -> tuple[Channel, Collector]:
    """Return the channel, and the collector that uses it."""
    keeping = KeepingChannel(channel, states)
    kept = SessionStates(cast("MemoryChannel", keeping))  # which only reads the states
    inner = build_collector(simulation, ClientLink(channel=channel, identities=identities))
    return keeping, SessionCollector(inner=inner, sessions=kept, bounded=None)
