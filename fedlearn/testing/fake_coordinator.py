"""A fake coordinator for tests, which a client cannot tell from a real one."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Self

from torch import Tensor

from fedlearn.algorithms.collector import collect_from
from fedlearn.algorithms.compression import find_compressor
from fedlearn.algorithms.lanes import DELTA
from fedlearn.algorithms.stragglers import BelowMinimum, StragglerPolicy
from fedlearn.algorithms.strategy import Strategy
from fedlearn.assembly.secure import require_summable
from fedlearn.config.privacy import PrivacySection
from fedlearn.config.secure_aggregation import SecureAggregationSection
from fedlearn.core.messages import (
    ClientId,
    EvaluateReply,
    EvaluateRequest,
    Failure,
    Settings,
    TrainReply,
)
from fedlearn.core.participations import Status
from fedlearn.core.secret_bytes import SecretBytes
from fedlearn.errors import DeploymentError
from fedlearn.gateway.eligibility import Requirements
from fedlearn.gateway.server import GatewaySettings
from fedlearn.rounds.evaluation import check_evaluation
from fedlearn.rounds.secure import SecureCollector
from fedlearn.rounds.updates import validate_or_refuse
from fedlearn.secagg.plan import SecurePlan
from fedlearn.testing.local_gateway import LocalGateway
from fedlearn.testing.requests import Model, build_round, to_params
from fedlearn.testing.stand_ins import Idle, run_stand_in
from fedlearn.training.trainer import LocalTrainer
from fedlearn.transport.base import Channel, ask_once

#: Seconds between two polls of the connected clients.
_LOOK_S = 0.02

#: Length of the run id that sessions of secure aggregation use.
_RUN_BYTES = 16


@dataclass(frozen=True, kw_only=True)
class SecureSum:
    """The result of one session of secure aggregation.

    Attributes:
        means: For each lane, the mean over the clients that reported, with the strategy's weights:
            shape [n]. Empty if nothing was released.
        reported: Names of the clients in the sum; their individual updates stay unknown.
        lost: For each other client, by name, the stage at which it was lost and why.

    Example:
        >>> import torch
        >>> result = SecureSum(
        ...     means={"delta": torch.tensor([0.5, 1.0])}, reported=["clinic-a", "clinic-b"],
        ...     lost={"clinic-c": "no reply"},
        ... )
        >>> result.means["delta"], len(result.reported)
        (tensor([0.5000, 1.0000]), 2)
    """

    means: Mapping[str, Tensor]
    reported: Sequence[str]
    lost: Mapping[str, str]


class FakeCoordinator(LocalGateway):
    """A coordinator in the test's process: real TLS and gRPC, but no round loop.

    The test sends each request and inspects the replies. A reply that a real round would reject is
    a failure here as well, and its client receives that verdict. All files are in a temporary
    folder, which is removed when the context exits.

    Args:
        run_id: As for :class:`~fedlearn.testing.local_gateway.LocalGateway`; to clients, a second
            fake with the same id continues the same run.
        requirements: Which clients are eligible.

    Example:
        An application's test, with its own trainer and agent::

            with FakeCoordinator() as coordinator:
                invitation = coordinator.invite("clinic-a")
                agent = Agent(home, trainer="my_app.training:Trainer", invitation=invitation)
                with agent:
                    agent.give_consent()
                    coordinator.wait_for(1)
                    replies = coordinator.train(model, {"epochs": 1, ...})
                assert replies["clinic-a"].num_examples == 120

        Stand-ins reply without an application:

        >>> from structlog.testing import capture_logs
        >>> from torch import nn
        >>> import fedlearn as fl
        >>> algorithm = fl.FedAvg(fl.LocalSgd(epochs=1, batch_size=10, learning_rate=0.1))
        >>> with capture_logs(), FakeCoordinator() as coordinator, coordinator.add_stand_ins(2):
        ...     coordinator.wait_for(2)
        ...     replies = coordinator.train(nn.Linear(3, 2), algorithm)
        >>> sorted(replies)
        ['stand-in-0', 'stand-in-1']
    """

    def __init__(
        self, *, run_id: str | None = None, requirements: Requirements | None = None
    ) -> None:
        self._temporary = TemporaryDirectory(prefix="fedlearn-fake-")
        eligible = (requirements or Requirements()).admits
        super().__init__(Path(self._temporary.name), run_id=run_id, eligible=eligible)
        self._rounds, self._stand_ins = count(), count()
        self._channel: Channel | None = None  # None while the server is down
        self._secure_run_id = SecretBytes.generate(_RUN_BYTES).reveal()

    def __enter__(self) -> Self:
        """Start the server on a free port."""
        super().__enter__()
        self._channel = self.gateway.channel()
        return self

    def __exit__(self, *_: object) -> None:
        """Stop the server and remove its files."""
        super().__exit__()
        self._temporary.cleanup()

    @property
    def address(self) -> str:
        """The address that clients connect to, ``host:port``."""
        return self.gateway.address

    def counters(self) -> Mapping[str, float]:
        """Return the server's counters: sessions, messages, refusals by cause."""
        return self.gateway.counters.values()

    def invite(self, name: str, *, tags: Sequence[str] = ()) -> Path:
        """Write a single-use invitation file for ``name``; raises as :meth:`invitation`."""
        path = self.folder / f"{name}.invitation"
        self.create_invitation(name, tags=tags).save(path)
        return path

    def revoke(self, name: str) -> None:
        """Revoke the client ``name``, and return when its session has ended.

        Raises:
            DeploymentError: No such client has joined.
        """
        self.registry.revoke(name)
        while name in self.list_clients():  # the server polls the registry for revocations
            self.clock.sleep(_LOOK_S)

    @contextmanager
    def outage(self) -> Iterator[None]:
        """Stop the server while the block runs, then restart it with the same address and run."""
        # Popped, so that leaving the context does not stop it a second time.
        gateway, self._channel = self.gateways.pop(), None
        back = GatewaySettings(address=gateway.address)
        gateway.stop(grace_s=0.0)
        try:
            yield
        finally:
            self._channel = self.open(back).channel()

    def list_clients(self) -> list[str]:
        """Return the names of the clients that are connected and eligible."""
        names, channel = self._list_names(), self._channel
        return [] if channel is None else [names[each] for each in channel.available()]

    def train(
        self, model: Model, training: Settings | Strategy, *, deadline_s: float = 60.0
    ) -> dict[str, TrainReply | Failure]:
        """Ask all connected clients to train, and collect the replies that arrive in time.

        Args:
            model: The global model.
            training: How to train: settings, such as ``settings_of(LocalSgd(epochs=1,
                batch_size=10, learning_rate=0.1))``, or a strategy, which sends its settings for a
                first round.
            deadline_s: Seconds to wait for replies.

        Returns:
            Each client's reply, by name, or a failure that says why its reply would not count. A
            late client is absent.

        Raises:
            DeploymentError: No client is connected.
        """
        request, names = (
            build_round(model, training, round_num=next(self._rounds)),
            self._list_names(),
        )
        channel, cohort = self._require_cohort()
        arrivals = ask_once(channel, request.messages(cohort), deadline_s=deadline_s)
        return {
            names[arrival.client_id]: validate_or_refuse(arrival, request) for arrival in arrivals
        }

    def train_securely(
        self,
        model: Model,
        training: Settings | Strategy,
        *,
        plan: SecurePlan | None = None,
        deadline_s: float = 60.0,
    ) -> SecureSum:
        """Ask all connected clients to train, and learn only the sum of their updates.

        A session needs several clients; :meth:`add_stand_ins` adds the missing ones.

        Args:
            model: As for :meth:`train`.
            training: As for :meth:`train`.
            plan: Parameters of the session; ``None`` uses the defaults of a coordinator that is
                configured with ``mode = "complete"``.
            deadline_s: Seconds for each stage.

        Raises:
            ConfigError: Too few clients for secure aggregation, or the strategy needs more than a
                sum; a run fails to build for the same reasons.
            DeploymentError: No client is connected.
            RoundError: ``plan`` and the strategy weight clients differently.
        """
        request = build_round(model, training, round_num=next(self._rounds))
        mean = require_summable(request.strategy)
        (channel, cohort), names = self._require_cohort(), self._list_names()
        if plan is None:
            plan = SecureAggregationSection(mode="complete").plan(
                len(cohort),
                min_reports=1,
                by_examples=mean.by_examples,
                further=[lane for lane in request.strategy.lanes if lane is not DELTA],
                has_model=DELTA in request.strategy.lanes,
                compressor=find_compressor(request.strategy.transforms),
                privacy=PrivacySection(),
            )
        collector = SecureCollector(
            channel=channel,
            # One attempt, without spare clients: the result says which were lost, and why.
            policy=StragglerPolicy(
                num_wanted=len(cohort),
                over_selection=1.0,
                deadline_s=deadline_s,
                min_reports=plan.min_survivors,
                below_minimum=BelowMinimum.FAIL,
                max_retries=0,
            ),
            plan=plan,
            run_id=self._secure_run_id,
            signer=self.authority.signer,
            directory=self._load_identity_keys,
            # There is no roster, so clients learn each other's keys from the coordinator.
            sends_directory=True,
            stage_deadline_s=deadline_s,
            num_threads=1,
        )
        collected = collect_from(collector, cohort, request)
        aggregate, rows = collected.aggregate, list(collected.participations)
        if aggregate is not None and plan.compressor is not None:
            aggregate = request.restore_sum(aggregate)
        return SecureSum(
            means={} if aggregate is None else aggregate.lanes,
            reported=[names[e.client_id] for e in rows if e.status is Status.REPORTED],
            lost={names[e.client_id]: e.reason for e in rows if e.status is not Status.REPORTED},
        )

    @contextmanager
    def add_stand_ins(
        self, num: int, *, trainer: LocalTrainer | None = None
    ) -> Iterator[list[str]]:
        """Keep ``num`` additional clients connected while the block runs; yields their names.

        Each runs the same runtime as an agent does, but on a thread of this process.

        Args:
            num: How many clients to add.
            trainer: The trainer of all of them; ``None`` uses one that has a single example and
                returns the model unchanged.

        Raises:
            FedlearnError: A client cannot join, or its runtime failed.
        """
        names = [f"stand-in-{next(self._stand_ins)}" for _ in range(num)]
        with ExitStack() as stack:
            for name in names:
                home = self.folder / "stand-ins" / name
                client = run_stand_in(self.invite(name), home=home, trainer=trainer or Idle())
                stack.enter_context(client)
            yield names

    def evaluate(
        self, model: Model, *, deadline_s: float = 60.0
    ) -> dict[str, EvaluateReply | Failure]:
        """Ask all connected clients to evaluate ``model``, as :meth:`train` asks them to train."""
        round_num, names = next(self._rounds), self._list_names()
        request = EvaluateRequest(round_num=round_num, tensors=to_params(model).to_tensors())
        channel, cohort = self._require_cohort()
        requests = dict.fromkeys(cohort, request)
        arrivals = ask_once(channel, requests, deadline_s=deadline_s)
        return {
            names[each.client_id]: check_evaluation(each, round_num=round_num) for each in arrivals
        }

    def _require_cohort(self) -> tuple[Channel, Sequence[ClientId]]:
        if self._channel is None:
            raise DeploymentError("this coordinator is stopped; ask after its outage")
        cohort = self._channel.available()
        if not cohort:
            raise DeploymentError("no client is connected; call `wait_for` first")
        return self._channel, cohort

    def _list_names(self) -> dict[ClientId, str]:
        return {client.client_id: client.name for client in self.registry.clients()}

    def _load_identity_keys(self) -> Mapping[ClientId, bytes]:
        clients = self.registry.clients()
        return {each.client_id: each.lineage for each in clients if each.status == "active"}
