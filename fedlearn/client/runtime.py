"""The client's own process: an event loop for the network, a thread for training.

What is done when is decided by :mod:`fedlearn.client.conversation`; this module performs it.
:class:`~fedlearn.client.agent.Agent` runs it in a child process, ``fedlearn join`` in the
foreground.
"""

import asyncio
import math
import os
from collections.abc import Callable, Coroutine
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field
from functools import partial
from importlib.metadata import version
from itertools import cycle
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import structlog
import torch

from fedlearn.client.backoff import Backoff
from fedlearn.client.conditions import Conditions, Device, Facts, local_time
from fedlearn.client.control import WorkControl
from fedlearn.client.conversation import (
    Action,
    Answered,
    CallOff,
    Connected,
    Conversation,
    Deliver,
    Disconnect,
    Disconnected,
    Drop,
    Ended,
    Erase,
    Event,
    Keep,
    Kept,
    Offered,
    Settled,
    Start,
    Stopped,
    Surveyed,
    Withdrawn,
    step,
)
from fedlearn.client.credentials import credentials_of
from fedlearn.client.events import AgentEvent, EventKind
from fedlearn.client.expansion import MasksAhead
from fedlearn.client.home import Enrolment, Home
from fedlearn.client.loading import make_trainer
from fedlearn.client.options import RuntimeOptions
from fedlearn.client.policy import Policy
from fedlearn.client.renewal import missing_key_advice, renewal_advice
from fedlearn.client.rotation import KeyRotation
from fedlearn.client.tasks import HeldReply, OpenTask, TaskKey
from fedlearn.core.clock import SystemClock
from fedlearn.core.codec import decode, encode
from fedlearn.core.cores import num_cores
from fedlearn.core.files import write_private
from fedlearn.core.messages import (
    ClientId,
    EvaluateRequest,
    Failure,
    SecureRequest,
    Settings,
    settings_in,
    training_in,
)
from fedlearn.errors import (
    Cancelled,
    ConnectionRefused,
    DeploymentError,
    PolicyViolation,
    ProtocolError,
)
from fedlearn.identity.rosters import IdentityRoster
from fedlearn.secagg.client import SecureClient
from fedlearn.session.session import ClientSession, log_refusal
from fedlearn.training.trainer import LocalTrainer
from fedlearn.transport import wire, wire_pb2
from fedlearn.transport.content import digest_of
from fedlearn.transport.grpc_client import Credentials, DoorConnection, DoorSession, enrol
from fedlearn.transport.identity import Invitation, signed_bytes

_SURVEY_S = 1.0
#: Seconds that a task which does not listen gets to end; then the process ends without it.
_STOP_S = 10.0
#: A session that lasted so long was no accident: the next back-off begins anew.
_STEADY_S = 30.0
_LOOK_AT_CERTIFICATE_S = 86_400.0
#: Longest absence that a coordinator may ask for.
_MAX_PAUSE_S = 3600.0
#: A failure is a few words; a reply that is larger need not be looked into.
_MAX_FAILURE_BYTES = 1 << 16
#: Crashes inside one task until it is given up.
_MAX_CRASHES = 3

_log = structlog.get_logger(__name__)


@runtime_checkable
class _CountsExamples(Protocol):
    """A trainer that knows how much data it has."""

    @property
    def num_examples(self) -> int:
        """Number of training examples."""


@runtime_checkable
class _NamesDevice(Protocol):
    """A trainer that knows where it computes."""

    @property
    def device(self) -> torch.device | str:
        """The device."""


@dataclass(eq=False)
class _Link:
    """One session, and the jobs that end with it."""

    connection: DoorConnection
    session: DoorSession
    leave: asyncio.Event = field(default_factory=asyncio.Event)
    jobs: set["asyncio.Task[None]"] = field(default_factory=set)
    delivered: set[TaskKey] = field(default_factory=set)

    def spawn(self, job: Coroutine[Any, Any, None]) -> "asyncio.Task[None]":
        """Run ``job`` until it is done or the session ends."""
        task = asyncio.create_task(job)
        self.jobs.add(task)
        task.add_done_callback(self.jobs.discard)
        return task

    async def close(self) -> None:
        """End what still runs."""
        jobs = list(self.jobs)
        for job in jobs:
            job.cancel()
        await asyncio.gather(*jobs, return_exceptions=True)


class Runtime:
    """Connects, works and delivers until it is told to stop.

    Args:
        home: The client's folder.
        trainer: The user's.
        invitation: To enrol with, or anew, unless that is done.
        conditions: What must hold before and during training.
        policy: What is refused.
        on_event: Told what happens; called in the event loop, must return at once.
        roster: File with the identity keys of other clients, which are then believed and no others;
            ``None``: who is seen first is.
    """

    def __init__(
        self,
        home: Home,
        trainer: LocalTrainer,
        *,
        invitation: Path | None,
        conditions: Conditions,
        policy: Policy,
        on_event: Callable[[AgentEvent], None],
        roster: Path | None = None,
    ) -> None:
        self._home, self._trainer, self._invitation = home, trainer, invitation
        self._roster = roster
        self._conditions, self._policy, self._on_event = conditions, policy, on_event
        self._clock = SystemClock()
        self._device, self._facts, self._told = Device(self._clock), Facts(), Facts()
        self._told_s = -math.inf
        self._here = Conversation()
        self._events: asyncio.Queue[Event] = asyncio.Queue()
        self._may_connect = asyncio.Event()
        self._backoff, self._pause_s = Backoff(), 0.0
        self._farewell = ""
        self._is_offline = False
        self._link: _Link | None = None
        self._control: WorkControl | None = None
        self._worker = ThreadPoolExecutor(1, thread_name_prefix="fedlearn-training")
        self._work: asyncio.Task[None] | None = None
        self._masks = MasksAhead()
        self._enrolment: Enrolment | None = None
        self._rotation = KeyRotation(home, clock=self._clock, on_event=on_event)
        self._run_id = ""
        self._next_look_unix_s = -math.inf
        self._broken = asyncio.Event()

    def stop(self) -> None:
        """End at the next batch; from the event loop's thread."""
        self._events.put_nowait(Stopped())
        asyncio.get_running_loop().call_later(_STOP_S, self._broken.set)

    def tell(self, facts: Facts) -> None:
        """Take what the application knows of the device; it holds for a few seconds."""
        self._told, self._told_s = facts, self._clock.now_s()

    async def run(self) -> bool:
        """Work until :meth:`stop`, or until consent is revoked: then local state is erased.

        Returns:
            Whether everything has ended; else a training thread does not listen, and the process
            must be ended.

        Raises:
            DeploymentError: The folder cannot be used, there is no consent, or no enrolment.
            EnrolmentRefused: The coordinator does not take the invitation.
        """
        with self._home.locked():
            if not self._home.has_consent():
                raise DeploymentError(
                    f"{self._home.folder} has no consent to take part; give it (Agent.give_consent)"
                )
            self._log_policy()
            self._here = Conversation(held=self._home.recover())
            is_done = await self._run_jobs()
            if not self._home.has_consent():
                self._home.erase()
        return is_done

    def _log_policy(self) -> None:
        """Say once under what this client takes part; what it refuses is named by these fields."""
        policy, conditions = asdict(self._policy), asdict(self._conditions)
        _log.info("policy_in_force", policy=policy, conditions=conditions)

    async def _run_jobs(self) -> bool:
        jobs = [
            asyncio.create_task(job)
            for job in (self._pump(), self._survey(), self._stay_connected(), self._break())
        ]
        try:
            done, _ = await asyncio.wait(jobs, return_when=asyncio.FIRST_COMPLETED)
        finally:
            await _cancel(jobs)
            self._masks.close()
        for job in done:
            job.result()  # raises what ended it
        self._worker.shutdown(wait=False)
        return self._work is None or self._work.done()

    async def _break(self) -> None:
        """End with work that does not end, or that ended as it never should."""
        await self._broken.wait()
        if self._work is not None and self._work.done():
            self._work.result()
        _log.error("task_does_not_stop", waited_s=_STOP_S)
        self._home.end_work()  # this process is ended on purpose

    # Events and actions

    async def _pump(self) -> None:
        while not self._here.is_done:
            await self._handle(await self._events.get())
        if self._work is not None:
            await self._work

    async def _handle(self, event: Event) -> None:
        self._here, actions = step(self._here, event)
        if self._here.may_connect:
            self._may_connect.set()
        else:
            self._may_connect.clear()
        for action in actions:
            await self._perform(action)

    async def _perform(self, action: Action) -> None:
        match action:
            case Start(task):
                await self._start(task)
            case CallOff(key, reason):
                self._call_off(key, reason)
            case Erase():
                self._home.close_task()
            case Keep(answered):
                await self._keep(answered)
            case Deliver(held, is_asked_again):
                self._deliver(held, is_asked_again=is_asked_again)
            case Drop(held, reason):
                _log.info("reply_dropped", round_num=held.key.round_num, reason=reason)
                self._home.drop(held)
            case Disconnect():
                if self._link is not None:
                    self._link.leave.set()

    def _emit(self, kind: EventKind, *, key: TaskKey | None = None, message: str = "") -> None:
        round_num = None if key is None else _round_of(key)
        self._on_event(AgentEvent(kind=kind, round_num=round_num, message=message))

    # Work

    async def _start(self, task: OpenTask) -> None:
        if self._work is not None:
            await self._work  # it has posted its last event: this is immediate
        loop = asyncio.get_running_loop()

        def on_report(fraction: float, loss: float) -> None:
            event = AgentEvent(
                kind=EventKind.PROGRESS,
                round_num=_round_of(task.key),
                fraction=fraction,
                loss=loss,
            )
            loop.call_soon_threadsafe(self._on_event, event)

        self._control = WorkControl(self._home, self._clock, on_report=on_report)
        self._work = asyncio.create_task(self._work_on(task, self._control))
        self._work.add_done_callback(self._check_work)

    def _check_work(self, work: "asyncio.Task[None]") -> None:
        if not work.cancelled() and work.exception() is not None:
            self._broken.set()

    def _call_off(self, key: TaskKey, reason: str) -> None:
        assert self._control is not None  # there is work
        self._control.call_off()
        if self._link is not None:
            for job in self._link.jobs:
                if job.get_name() == _download_name(key):
                    job.cancel()
        _log.info("task_called_off", round_num=key.round_num, reason=reason)
        self._emit(EventKind.CANCELLED, key=key, message=reason)

    async def _work_on(self, task: OpenTask, control: WorkControl) -> None:
        """Work on one task; posts :class:`Answered` or :class:`Ended`, whatever happens."""
        event: Event = Ended(task.key)
        try:
            event = await self._answer(task, control)
        except (DeploymentError, ProtocolError) as error:
            self._tell_failure(task.key, str(error))
            event = _failed(task, type(error).__name__)
        finally:
            self._events.put_nowait(event)

    async def _answer(self, task: OpenTask, control: WorkControl) -> Event:
        try:
            return await self._answer_within_policy(task, control)
        except PolicyViolation as violation:
            return self._refuse(task, violation)

    async def _answer_within_policy(self, task: OpenTask, control: WorkControl) -> Event:
        assert self._enrolment is not None  # a task came over a session
        advice = missing_key_advice(self._enrolment)
        if advice is not None and task.key.kind == SecureRequest.__name__:
            return self._tell_inability(task, advice)
        num_crashes = self._home.open_task(task)
        self._judge(task.key.kind, None)
        if num_crashes >= _MAX_CRASHES:
            words = f"the client's process crashed {_MAX_CRASHES} times in this task"
            self._tell_failure(task.key, words)
            return _failed(task, words)
        if not await self._fetch(task) or control.is_called_off:
            return Ended(task.key)
        loop = asyncio.get_running_loop()
        is_training = await loop.run_in_executor(self._worker, self._judge_in_full)
        is_evaluation = task.key.kind == EvaluateRequest.__name__
        self._emit(EventKind.EVALUATING if is_evaluation else EventKind.TRAINING, key=task.key)
        self._report_phase(task.key, wire_pb2.Progress.TRAINING)

        def on_refusal(violation: PolicyViolation) -> None:
            loop.call_soon_threadsafe(self._tell_refusal, task.key, violation)

        def on_failure(words: str) -> None:
            loop.call_soon_threadsafe(self._tell_failure, task.key, words)

        session = ClientSession(
            self._enrolment.client_id,
            self._trainer,
            self._secure(self._enrolment),
            on_refusal=on_refusal,
            on_failure=on_failure,
            pin_file=self._home.pin_file(self._enrolment),
            expanded=self._masks.take,
        )
        work = partial(self._train, task, session, control, is_training=is_training)
        return await loop.run_in_executor(self._worker, work)

    def _secure(self, enrolment: Enrolment) -> SecureClient | None:
        """Return this client's side of secure aggregation; ``None``: it has no key to trust."""
        coordinator_key = enrolment.invitation.coordinator_key
        if not coordinator_key:
            return None
        return SecureClient(
            client_id=enrolment.client_id,
            signer=enrolment.identity,
            coordinator_key=coordinator_key,
            directory={enrolment.client_id: enrolment.identity.public_key},
            policy=self._policy.secure_aggregation.terms(),
            num_threads=num_cores(),
        )

    def _judge(self, kind: str, settings: Settings | None) -> None:
        num_tasks = self._home.num_tasks_today(self._clock.unix_s())
        self._policy.judge(kind, settings=settings, num_tasks_today=num_tasks)

    def _tell_failure(self, key: TaskKey, words: str) -> None:
        """Tell the user; ``words`` may quote the data, the coordinator hears less."""
        _log.error("task_failed", round_num=key.round_num, error=words)
        self._emit(EventKind.FAILED, key=key, message=words)

    def _tell_inability(self, task: OpenTask, advice: str) -> Answered:
        _log.error("secure_aggregation_without_key", advice=advice)
        self._emit(EventKind.FAILED, key=task.key, message=advice)
        return _failed(task, advice)

    def _refuse(self, task: OpenTask, violation: PolicyViolation) -> Answered:
        self._tell_refusal(task.key, violation)
        return _failed(task, str(violation))

    def _tell_refusal(self, key: TaskKey, violation: PolicyViolation) -> None:
        log_refusal(violation, round_num=key.round_num)
        self._emit(EventKind.POLICY, key=key, message=str(violation))

    async def _fetch(self, task: OpenTask) -> bool:
        """Have the whole request on disk; returns whether it is."""
        if task.data:
            if digest_of(task.data) != task.digest:
                raise ProtocolError("the request's bytes are not those that were announced")
            write_private(self._home.request, task.data)
            return True
        self._home.require_space(task.num_bytes)
        link = self._link
        if link is None:
            return False
        self._emit(EventKind.DOWNLOADING, key=task.key)
        self._report_phase(task.key, wire_pb2.Progress.DOWNLOADING)
        job = link.spawn(
            link.connection.download(task.digest, num_bytes=task.num_bytes, path=self._home.request)
        )
        job.set_name(_download_name(task.key))
        await asyncio.wait([job])
        if job.cancelled():
            return False
        try:
            job.result()
        except (ConnectionError, ConnectionRefused) as error:
            _log.debug("download_broken", error=str(error))
            return False
        return True

    def _train(
        self, task: OpenTask, session: ClientSession, control: WorkControl, *, is_training: bool
    ) -> Event:
        """Answer the request on disk; in the training thread."""
        data = self._home.request.read_bytes()
        before = self._home.state(task.key.run_id)
        if is_training:  # whatever comes of it, the data are worked with from here on
            self._home.count_task(self._clock.unix_s())
        self._home.begin_work()
        try:
            reply, state = session.handle(data, before, personal=task.personal, control=control)
        except Cancelled:
            return Ended(task.key)
        finally:
            self._home.end_work()
        if 0 < task.max_reply_bytes < len(reply):
            words = f"a reply of {len(reply)} bytes, at most {task.max_reply_bytes} are taken"
            session.on_failure(words)
            return _failed(task, words)
        return Answered(task, reply, None if state == before else state)

    def _judge_in_full(self) -> bool:
        """Judge the request on disk, whatever it was announced as; in the training thread.

        Returns:
            Whether it is answered by training.

        Raises:
            PolicyViolation: The policy refuses it.
        """
        try:
            request = decode(self._home.request.read_bytes())
        except ProtocolError:
            return False  # the session says so
        self._judge(type(request).__name__, settings_in(request))
        return training_in(request) is not None

    async def _keep(self, answered: Answered) -> None:
        task = answered.task
        try:
            held = await asyncio.to_thread(
                self._home.hold, task, reply=answered.reply, state=answered.state
            )
        except DeploymentError as error:
            _log.error("reply_not_kept", round_num=task.key.round_num, error=str(error))
            self._emit(EventKind.FAILED, key=task.key, message=str(error))
            self._home.close_task()
            reply = encode(Failure(type(error).__name__))  # said once: it cannot be kept either
            self._tell_coordinator(self._result(task.key, reply))
            return
        await self._handle(Kept(held))
        self._expand_masks(task, answered.state)

    def _expand_masks(self, task: OpenTask, state: bytes | None) -> None:
        """Forget masks of before; begin on those that the next message will need, if any."""
        self._masks.drop()
        if task.key.kind != SecureRequest.__name__ or self._link is None:
            return
        assert self._enrolment is not None  # there is a session
        secure = self._secure(self._enrolment)
        if secure is not None and state is not None:
            self._masks.follow(secure, state)

    # Replies

    def _deliver(self, held: HeldReply, *, is_asked_again: bool) -> None:
        link = self._link
        # An upload that was not heard has ended with an error; what went inside the session
        # may be lost without one, and is recognised if it was not.
        is_due = is_asked_again and _is_inline(held)
        if link is None or (held.key in link.delivered and not is_due):
            return
        link.delivered.add(held.key)
        if not _is_failure(held):  # that it failed is told already
            self._emit(EventKind.UPLOADING, key=held.key)
        self._report_phase(held.key, wire_pb2.Progress.UPLOADING)
        link.spawn(self._send_reply(link, held))

    async def _send_reply(self, link: _Link, held: HeldReply) -> None:
        try:
            if _is_inline(held):
                await link.session.send(self._result(held.key, held.path.read_bytes()))
            else:
                envelope = self._envelope(held.key, held.digest, held.num_bytes)
                self._take_receipt(await link.connection.upload(envelope, held.path))
        except (ConnectionError, ConnectionRefused, ProtocolError) as error:
            _log.debug("delivery_broken", error=str(error))
            link.leave.set()  # it is delivered in the next session
        except DeploymentError as error:
            _log.error("reply_unreadable", round_num=held.key.round_num, error=str(error))
            self._events.put_nowait(Settled(held.key))

    def _result(self, key: TaskKey, reply: bytes) -> wire_pb2.FromClient:
        envelope = self._envelope(key, digest_of(reply), len(reply))
        return wire_pb2.FromClient(result=wire_pb2.Result(envelope=envelope, data=reply))

    def _envelope(self, key: TaskKey, digest: bytes, num_bytes: int) -> wire_pb2.Envelope:
        enrolment = self._enrolment
        assert enrolment is not None  # there is a session
        message = key.message()
        signed = signed_bytes(message, client_id=enrolment.client_id, digest=digest)
        return wire_pb2.Envelope(
            key=message,
            digest=digest,
            num_bytes=num_bytes,
            signature=enrolment.identity.sign(signed),
        )

    def _take_receipt(self, receipt: wire_pb2.Receipt) -> None:
        kinds = {
            wire_pb2.Receipt.ACCEPTED: EventKind.ACCEPTED,
            wire_pb2.Receipt.LATE: EventKind.LATE,
        }
        key = TaskKey.of(receipt.key)
        kind = kinds.get(receipt.verdict, EventKind.REFUSED)
        _log.info("reply_settled", kind=key.kind, round_num=key.round_num, verdict=kind.value)
        held = self._here.held
        is_failure = held is None or held.key != key or _is_failure(held)
        if kind is not EventKind.ACCEPTED or not is_failure:  # a failure counts for nothing
            self._emit(kind, key=key, message=receipt.reason)
        if kind is not EventKind.ACCEPTED:
            self._masks.drop()  # the session goes on without this client
        self._backoff.reset()
        self._events.put_nowait(Settled(key))
        self._look_at_rotation()  # this may have been the end of a session, and the next be near

    # The network

    async def _stay_connected(self) -> None:
        await self._may_connect.wait()
        roster = None if self._roster is None else IdentityRoster.load(self._roster)
        self._enrolment = await self._enrolled()
        if roster is not None:
            self._home.pin_roster(roster, self._enrolment)
        for address in cycle(self._enrolment.invitation.addresses):
            await self._may_connect.wait()
            if self._rotation.is_due(self._enrolment, run_id=self._run_id, is_connected=False):
                self._enrolment = await self._rotation.carried_out(self._enrolment)
            await self._visit(address, credentials_of(self._enrolment), self._enrolment)
            pause_s = self._pause_s or self._backoff.next_s()
            _log.debug("pause", address=address, pause_s=pause_s)
            self._pause_s = 0.0
            await asyncio.sleep(pause_s)

    async def _enrolled(self) -> Enrolment:
        """Return this client's enrolment, made now, or anew, if there is a new invitation."""
        current = self._home.enrolment()
        given = None if self._invitation is None else Invitation.load(self._invitation)
        if current is not None and (given is None or current.is_with(given)):
            return current
        if given is None:
            raise DeploymentError(
                f"{self._home.folder} is not enrolled; pass the invitation that the coordinator's "
                "operator made (`fedlearn invite NAME`)"
            )
        identity, lineage = self._home.coming_identity(), self._home.coming_lineage(given)
        for address in cycle(given.enrolment_addresses):
            await self._may_connect.wait()
            try:
                certificate_pem, client_id = await enrol(
                    address, given, identity, lineage=lineage.to_bytes()
                )
            except ConnectionError as error:
                self._be_offline(address, error)
                await asyncio.sleep(self._backoff.next_s())
            else:
                break
        self._backoff.reset()
        _log.info("enrolled", client_id=client_id)
        self._emit(EventKind.ENROLLED)
        return self._home.enrol(
            given, certificate_pem=certificate_pem, client_id=ClientId(client_id)
        )

    async def _visit(
        self, address: str, credentials: Credentials | None, enrolment: Enrolment
    ) -> None:
        """Hold one session with the coordinator at ``address``."""
        begin_s = self._clock.now_s()
        name = enrolment.invitation.name
        try:
            async with (
                DoorConnection(address, credentials, name=name) as connection,
                connection.session(self._hello()) as session,
            ):
                await self._converse(_Link(connection, session), address)
        except ConnectionError as error:
            self._be_offline(address, error)
        except (ConnectionRefused, ProtocolError) as error:
            _log.warning("refused", address=address, error=str(error))
            self._emit(EventKind.REFUSED, message=str(error))
        if self._clock.now_s() - begin_s > _STEADY_S:
            self._backoff.reset()

    def _be_offline(self, address: str, error: ConnectionError) -> None:
        """Say once that there is no connection; a device is offline more often than not."""
        log = _log.debug if self._is_offline else _log.info
        log("offline", address=address, error=str(error))
        if not self._is_offline:
            self._emit(EventKind.OFFLINE, message=str(error))
        self._is_offline = True

    async def _converse(self, link: _Link, address: str) -> None:
        self._is_offline, self._farewell = False, ""
        self._forget_other_runs(link.session.welcome.run_id)
        _log.info("connected", address=address, run_id=link.session.welcome.run_id)
        self._emit(EventKind.CONNECTED, message=address)
        self._link, self._run_id = link, link.session.welcome.run_id
        self._events.put_nowait(Connected(link.session.welcome.run_id))
        ends = [
            asyncio.create_task(self._receive(link.session)),
            asyncio.create_task(link.leave.wait()),
        ]
        try:
            done, _ = await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
        finally:
            self._link = None
            self._masks.drop()
            _log.info("disconnected", address=address, reason=self._farewell)
            self._emit(EventKind.DISCONNECTED, message=self._farewell)
            self._events.put_nowait(Disconnected())
            await link.close()
            await _cancel(ends)
        for end in done:
            end.result()  # raises what cut the session

    def _forget_other_runs(self, run_id: str) -> None:
        """Remove what is kept of runs that are over; what cannot go now is tried again."""
        try:
            self._home.forget_other_runs(run_id)
        except DeploymentError as error:
            _log.warning("old_state_not_removed", error=str(error))

    async def _receive(self, session: DoorSession) -> None:
        while (message := await session.receive()) is not None:
            match message.WhichOneof("what"):
                case "task":
                    task = OpenTask.of(message.task, now_unix_s=self._clock.unix_s())
                    self._events.put_nowait(Offered(task))
                case "cancel":
                    key = TaskKey.of(message.cancel.key)
                    self._events.put_nowait(Withdrawn(key, message.cancel.reason))
                case "come_back":
                    self._pause_s = min(max(0.0, message.come_back.after_s), _MAX_PAUSE_S)
                    self._farewell = message.come_back.reason
                    return
                case "receipt":
                    self._take_receipt(message.receipt)
                case other:
                    raise ProtocolError(f"the coordinator sent {other} within a session")

    def _hello(self) -> wire_pb2.Hello:
        held = self._here.held
        return wire_pb2.Hello(
            protocol=wire.PROTOCOL,
            software=f"fedlearn {version('fedlearn')}",
            eligibility=self._eligibility(),
            held=[] if held is None else [held.key.message()],
        )

    def _eligibility(self) -> wire_pb2.Eligibility:
        trainer = self._trainer
        may_tell = not self._policy.secure_aggregation.required  # else that is for the sum alone
        count = trainer.num_examples if may_tell and isinstance(trainer, _CountsExamples) else 0
        return wire_pb2.Eligibility(
            num_examples=count,
            device=_kind_of(trainer.device) if isinstance(trainer, _NamesDevice) else "cpu",
            **{name: value for name, value in vars(self._facts).items() if value is not None},
        )

    def _report_phase(self, key: TaskKey, phase: "wire_pb2.Progress.Phase") -> None:
        progress = wire_pb2.Progress(key=key.message(), phase=phase)
        self._tell_coordinator(wire_pb2.FromClient(progress=progress))

    def _tell_coordinator(self, message: wire_pb2.FromClient) -> None:
        """Send what may get lost."""

        async def send(link: _Link) -> None:
            try:
                await link.session.send(message)
            except (ConnectionError, ConnectionRefused):
                link.leave.set()

        if self._link is not None:
            self._link.spawn(send(self._link))

    # The device

    async def _survey(self) -> None:
        """Look every second at what may end the work: consent, conditions, deadlines."""
        if self._conditions.idle:  # measured from one look to the next
            await asyncio.to_thread(self._device.facts)
            await asyncio.sleep(_SURVEY_S)
        while True:
            facts = self._merged(await asyncio.to_thread(self._device.facts))
            now_unix_s = self._clock.unix_s()
            unmet = self._conditions.unmet(facts, local=local_time(now_unix_s))
            if unmet != self._here.unmet:
                self._say_unmet(unmet)
            if unmet:
                self._masks.drop()
            if facts != self._facts:
                self._facts = facts
                self._tell_coordinator(wire_pb2.FromClient(eligibility=self._eligibility()))
            self._events.put_nowait(Surveyed(unmet, now_unix_s))
            self._look_at_certificate(now_unix_s)
            self._look_at_rotation()
            if not self._home.has_consent() and not self._here.is_stopping:
                _log.info("consent_revoked")
                self.stop()
            await asyncio.sleep(_SURVEY_S)

    def _look_at_certificate(self, now_unix_s: float) -> None:
        """Say once a day that it must be renewed, while that is so."""
        if self._enrolment is None or now_unix_s < self._next_look_unix_s:
            return
        self._next_look_unix_s = now_unix_s + _LOOK_AT_CERTIFICATE_S
        advice = renewal_advice(self._enrolment, now_unix_s=now_unix_s)
        if advice is not None:
            _log.warning("certificate_ends", advice=advice)
            self._emit(EventKind.EXPIRING, message=advice)

    def _look_at_rotation(self) -> None:
        """Leave the session if keys are to be replaced, which is done before the next."""
        if self._enrolment is None or self._link is None:
            return
        if self._rotation.is_due(self._enrolment, run_id=self._run_id, is_connected=True):
            self._link.leave.set()

    def _say_unmet(self, unmet: tuple[str, ...]) -> None:
        # What cannot be told never holds: nothing would ever be trained, and nobody knew why.
        log = _log.warning if any("unknown" in each for each in unmet) else _log.info
        log("conditions", unmet=unmet)
        if unmet:
            self._emit(EventKind.WAITING, message=", ".join(unmet))

    def _merged(self, found: Facts) -> Facts:
        """Return what the application says where it says something, else what was found."""
        if self._clock.now_s() - self._told_s > 5.0 * _SURVEY_S:
            return found
        told = {name: value for name, value in vars(self._told).items() if value is not None}
        return Facts(**{**vars(found), **told})


def _kind_of(device: torch.device | str) -> str:
    """Return what a coordinator asks for: "cuda", whichever of several GPUs it is."""
    return str(device).partition(":")[0]


def _failed(task: OpenTask, reason: str) -> Answered:
    return Answered(task, encode(Failure(reason)), None)


def _is_failure(held: HeldReply) -> bool:
    if held.num_bytes > _MAX_FAILURE_BYTES:
        return False
    try:
        return isinstance(decode(held.path.read_bytes()), Failure)
    except (OSError, ProtocolError):
        return False  # that it is of no use is found out where it is sent


def _round_of(key: TaskKey) -> int | None:
    """Return the round that the user is told: an evaluation is of the model after it."""
    if key.kind != EvaluateRequest.__name__:
        return key.round_num
    return key.round_num - 1 if key.round_num else None


def _is_inline(held: HeldReply) -> bool:
    return held.num_bytes <= min(held.max_inline_bytes, wire.MAX_INLINE_BYTES)


def _download_name(key: TaskKey) -> str:
    return f"download {key}"


async def _cancel(jobs: list[asyncio.Task[Any]]) -> None:
    for job in jobs:
        job.cancel()
    await asyncio.gather(*jobs, return_exceptions=True)


def make_runtime(options: RuntimeOptions, *, on_event: Callable[[AgentEvent], None]) -> Runtime:
    """Give way to other programs as asked, and make the trainer; what that raises passes.

    Raises:
        DeploymentError: There is no such trainer.
    """
    os.nice(options.niceness)
    torch.set_num_threads(options.num_threads)
    return Runtime(
        Home(options.home),
        make_trainer(options.trainer),
        invitation=options.invitation,
        conditions=options.conditions,
        policy=options.policy,
        on_event=on_event,
        roster=options.roster,
    )
