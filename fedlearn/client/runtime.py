"""Run a client: an event loop for the network, and a thread for training.

:mod:`fedlearn.client.conversation` decides what to do next; this module performs the actions.
:class:`~fedlearn.client.agent.Agent` and ``fedlearn join`` run it in a child process.
"""

import asyncio
import math
from collections.abc import Callable
from dataclasses import asdict, replace

import structlog
import torch

from fedlearn.client import conversation
from fedlearn.client.bundle_downloads import BundleDownloads
from fedlearn.client.bundle_runner import BundleRunner
from fedlearn.client.conditions import Device, Facts, local_time
from fedlearn.client.connecting import Connector
from fedlearn.client.control import WorkControl
from fedlearn.client.events import AgentEvent, EventKind
from fedlearn.client.expansion import MaskExpander
from fedlearn.client.home import Home
from fedlearn.client.live_session import LiveSession, cancel
from fedlearn.client.options import Changes, RuntimeOptions
from fedlearn.client.prefetch import ModelPrefetcher
from fedlearn.client.sharing import make_client_trainer
from fedlearn.client.tasks import HeldReply, OpenTask
from fedlearn.client.trainers import SpareTrainers
from fedlearn.client.work import Worker, name_task
from fedlearn.core.clock import SystemClock
from fedlearn.core.codec import encode, peek
from fedlearn.core.cores import lower_priority
from fedlearn.core.kinds import SECURE_KIND
from fedlearn.core.messages import Failure, TrainReply
from fedlearn.core.software import SOFTWARE
from fedlearn.core.tracing import span_within
from fedlearn.errors import ConnectionRefused, DeploymentError, ProtocolError
from fedlearn.parallel.shared_trainer import SharedTrainer
from fedlearn.training.trainer import LocalTrainer
from fedlearn.transport import wire_pb2
from fedlearn.transport.content import TaskKey

_SURVEY_S = 1.0
#: Seconds that a task gets to stop before the process exits without waiting for it.
_STOP_S = 10.0
_LOOK_AT_CERTIFICATE_S = 86_400.0

_VERDICTS = {
    wire_pb2.Receipt.ACCEPTED: EventKind.ACCEPTED,
    wire_pb2.Receipt.LATE: EventKind.LATE,
}

_log = structlog.get_logger(__name__)


class Runtime:
    """Runs a client: connects to the coordinator, works on tasks and delivers replies.

    Args:
        options: Options of the client.
        trainer: The trainer that they name; ``None`` if they name none.
        on_event: Called with each event, in the event loop; must return at once.
    """

    def __init__(
        self,
        options: RuntimeOptions,
        trainer: LocalTrainer | None,
        *,
        on_event: Callable[[AgentEvent], None],
    ) -> None:
        self._home, self._trainer, self._on_event = Home(options.home), trainer, on_event
        self._conditions, self._policy = options.conditions, options.policy
        self._clock = SystemClock()
        self._device, self._facts = Device(self._clock), Facts()
        self._here = conversation.Conversation()
        self._events: asyncio.Queue[conversation.Event] = asyncio.Queue()
        self._controls = dict[str, WorkControl]()  # by run
        self._work = dict[str, asyncio.Task[None]]()  # by run
        self._masks = MaskExpander()
        self._receipts = dict[str, TaskKey]()  # by run, of the last reply that has a receipt
        runner = BundleRunner(
            options.home, options.policy.bundles, num_threads=options.resources.num_threads
        )
        self._bundles = BundleDownloads(
            home=self._home,
            runner=runner,
            find_live=lambda: self._connector.live,
            on_event=on_event,
            on_change=self._report_eligibility,
        )
        self._connector = Connector(
            self._home,
            invitation=options.invitation,
            connection=options.connection,
            hello=self._hello,
            post=self._events.put_nowait,
            on_event=on_event,
            on_receipt=self._take_receipt,
            on_bundle=self._bundles.take_notice,
        )
        self._worker = Worker(
            home=self._home,
            trainer=trainer,
            spares=SpareTrainers(options, most=self._count_spares()),
            policy=options.policy,
            clock=self._clock,
            connector=self._connector,
            masks=self._masks,
            bundles=runner,
            on_event=on_event,
            exit_code=options.exit_code,
        )
        self._prefetcher = ModelPrefetcher(
            home=self._home,
            clock=self._clock,
            post=self._events.put_nowait,
            require_allowed=self._require_allowed,
        )
        self._next_look_unix_s = -math.inf
        self._studies = frozenset[str]()
        self._broken = asyncio.Event()

    def stop(self) -> None:
        """Stop at the next batch; call this from the event loop's thread."""
        self._events.put_nowait(conversation.StopRequested())
        # Training stops at the end of a batch; one that hangs must not keep the process.
        asyncio.get_running_loop().call_later(_STOP_S, self._broken.set)

    def update_facts(self, facts: Facts) -> None:
        """Store facts about the device from the application; they are valid for a few seconds."""
        self._device.set_facts(facts)

    def change(self, changes: Changes) -> None:
        """Replace the conditions and the policy; call this from the event loop's thread.

        The conditions take effect within a second, the policy with the next message.
        """
        before, most = self._policy.max_concurrent_runs, changes.policy.max_concurrent_runs
        self._conditions, self._policy = changes.conditions, changes.policy
        self._worker.spares.most = self._count_spares()
        self._worker.spares.prepare()
        self._worker = replace(self._worker, policy=changes.policy)
        self._bundles.change(changes.policy.bundles)
        self._report_eligibility()
        if most != before:
            self._connector.leave()  # the number holds for a session

    def wake(self) -> None:
        """Try to connect now instead of waiting; call this from the event loop's thread."""
        self._connector.wake()

    async def run(self) -> bool:
        """Work until :meth:`stop`, or until consent is revoked, which also erases local state.

        Returns:
            Whether everything has ended. If not, the training thread does not react, and the
            process must be killed.

        Raises:
            DeploymentError: The folder cannot be used, or consent or enrolment is missing.
            EnrolmentRefused: The coordinator rejects the invitation.
        """
        with self._home.lock():
            if not self._home.has_consent():
                raise DeploymentError(
                    f"{self._home.folder} has no consent to take part; give it (Agent.give_consent)"
                )
            # For the record: refusals name the fields that are logged here.
            policy, conditions = asdict(self._policy), asdict(self._conditions)
            _log.info("policy_in_force", policy=policy, conditions=conditions)
            if warning := self._policy.secure_aggregation.warning:
                _log.warning("policy_is_weak", warning=warning)
            held = {each.key.run_id: each for each in self._home.recover()}
            self._here = conversation.Conversation(held=held)
            is_done = await self._run_jobs()
            if not self._home.has_consent():
                self._home.erase()
        return is_done

    def _count_spares(self) -> int:
        """Return how many other processes with trainers are kept."""
        num_runs = self._policy.max_concurrent_runs
        return num_runs if num_runs > 1 and self._trainer is not None else 0

    async def _run_jobs(self) -> bool:
        self._worker.spares.prepare()
        jobs = [
            asyncio.create_task(job)
            for job in (self._pump(), self._survey(), self._connector.run(), self._break())
        ]
        try:
            done, _ = await asyncio.wait(jobs, return_when=asyncio.FIRST_COMPLETED)
        finally:
            await cancel(jobs)
            self._masks.close()
            if isinstance(self._trainer, SharedTrainer):
                self._trainer.close()
        for job in done:
            job.result()  # raises the error that ended it
        self._worker.close()
        self._bundles.runner.close()
        return all(each.done() for each in self._work.values())

    async def _break(self) -> None:
        """Give up on work that does not stop, or raise the unexpected error that ended it."""
        await self._broken.wait()
        for work in self._work.values():
            if work.done():
                work.result()
        _log.error("task_does_not_stop", waited_s=_STOP_S)
        for run_id in self._work:
            self._home.task(run_id).end_work()  # this process exits on purpose: not a crash

    # Events and actions

    async def _pump(self) -> None:
        while not self._here.is_done:
            await self._handle(await self._events.get())
            # Only after all actions, because starting a fetch removes the model fetched before,
            # which the work just started may still need.
            to_fetch = self._here.to_fetch if self._policy.train_ahead else None
            self._prefetcher.follow(to_fetch, self._connector.live)
        await asyncio.gather(*self._work.values())

    async def _handle(self, event: conversation.Event) -> None:
        self._here, actions = conversation.step(self._here, event)
        if self._here.may_connect:
            self._connector.allowed.set()
        else:
            self._connector.allowed.clear()
        if self._here.unmet or not self._here.is_connected:
            self._masks.drop()
        for action in actions:
            await self._perform(action)

    async def _perform(self, action: conversation.Action) -> None:
        match action:
            case conversation.Begin(task):
                await self._begin(task)
            case conversation.Adopt(task):
                if (live := self._connector.live) is not None:
                    live.report_phase(task.key, wire_pb2.Progress.TRAINING)
            case conversation.Cancel(key, reason):
                self._cancel(key, reason)
            case conversation.Erase(run_id):
                self._home.task(run_id).close()
            case conversation.Hold(answered):
                await self._hold(answered)
            case conversation.Deliver(held, is_requested_again):
                self._deliver(held, is_requested_again=is_requested_again)
            case conversation.Drop(held, reason):
                _log.info("reply_dropped", round_num=held.key.round_num, reason=reason)
                self._home.drop(held)
            case conversation.Disconnect():
                self._connector.leave()

    # Work

    async def _begin(self, task: OpenTask) -> None:
        run_id = task.key.run_id
        if (before := self._work.pop(run_id, None)) is not None:
            await before  # returns at once, since it has posted its last event
        self._home.forget_tasks(at_work=self._here.work, run_ids=self._here.run_ids)
        await self._prefetcher.stop()  # it may be fetching the very model that this task needs
        self._prefetcher.times.begin(run_id, self._clock.now_s())
        loop, about = asyncio.get_running_loop(), AgentEvent.of(EventKind.PROGRESS, key=task.key)

        def on_report(fraction: float, loss: float) -> None:
            event = replace(about, fraction=fraction, loss=loss)
            loop.call_soon_threadsafe(self._on_event, event)
            loop.call_soon_threadsafe(self._prefetcher.update_progress, run_id, fraction)

        control = WorkControl(self._home.task(run_id), self._clock, on_report=on_report)
        self._controls[run_id] = control
        self._work[run_id] = asyncio.create_task(self._work_on(task, control))
        self._work[run_id].add_done_callback(self._check_work)

    def _check_work(self, work: "asyncio.Task[None]") -> None:
        # `answer` turns every expected error into an event, so this one is a bug: `_break` raises
        # it.
        if not work.cancelled() and work.exception() is not None:
            self._broken.set()

    def _cancel(self, key: TaskKey, reason: str) -> None:
        self._controls[key.run_id].cancel()
        _log.info("task_called_off", round_num=key.round_num, reason=reason)
        self._on_event(AgentEvent.of(EventKind.CANCELLED, key=key, message=reason))

    def _require_allowed(self, task: OpenTask) -> None:
        # Look up `self._worker` for each call, since a new policy replaces it.
        self._worker.require_allowed(task)

    async def _work_on(self, task: OpenTask, control: WorkControl) -> None:
        run_id = task.key.run_id
        event: conversation.Event = conversation.WorkAbandoned(run_id)
        try:
            event = await self._worker.answer(task, control)
        finally:
            is_whole = isinstance(event, conversation.WorkFinished)
            self._prefetcher.times.end(run_id, self._clock.now_s(), is_whole=is_whole)
            # In any case: the state machine waits for exactly one event from each task.
            self._events.put_nowait(event)

    async def _hold(self, answered: conversation.WorkFinished) -> None:
        task, content = answered.task, peek(answered.reply)
        if isinstance(content, TrainReply) and content.round_num != task.key.round_num:
            numbers = {"round_num": task.key.round_num, "based_on": content.round_num}
            _log.info("answered_with_work_ahead", **numbers)
        try:
            held = await asyncio.to_thread(
                self._home.hold,
                task,
                reply=answered.reply,
                state=answered.state,
                trainer=answered.trainer,
            )
        except DeploymentError as error:
            _log.error("reply_not_kept", round_num=task.key.round_num, error=str(error))
            self._on_event(AgentEvent.of(EventKind.FAILED, key=task.key, message=str(error)))
            self._home.task(task.key.run_id).close()
            # Send the failure once, without storing it: the disk cannot be written.
            reply = encode(Failure(type(error).__name__))
            if (live := self._connector.live) is not None:
                live.send(live.build_result(task.key, reply))
            return
        if held.key == self._receipts.get(held.key.run_id):
            del self._receipts[held.key.run_id]  # the same task was offered and answered again
        await self._handle(conversation.ReplyStored(held))
        self._expand_masks(task, answered.state)

    def _deliver(self, held: HeldReply, *, is_requested_again: bool) -> None:
        """Send a reply in this session, unless it was sent already and must have arrived."""
        live = self._connector.live
        if live is None:
            return
        # A lost upload ends with an error, so it needs no repetition here. An inline reply can get
        # lost without an error; the coordinator recognizes a duplicate.
        is_due = is_requested_again and held.is_inline
        if held.key in live.sent_replies and not is_due:
            return
        live.sent_replies.add(held.key)
        if not held.is_failure():  # a failure was reported when it happened
            self._on_event(AgentEvent.of(EventKind.UPLOADING, key=held.key))
        live.report_phase(held.key, wire_pb2.Progress.UPLOADING)
        live.spawn(self._send(live, held))

    async def _send(self, live: LiveSession, held: HeldReply) -> None:
        try:
            with (
                name_task(held.key, live.enrolment.client_id),
                span_within(held.traceparent, "client.upload", num_bytes=held.num_bytes),
            ):
                if held.is_inline:
                    reply = held.path.read_bytes()
                    result = live.build_result(held.key, reply, trainer=held.trainer)
                    await live.session.send(result)
                else:
                    envelope = live.build_envelope(
                        held.key,
                        digest=held.digest,
                        num_bytes=held.num_bytes,
                        trainer=held.trainer,
                    )
                    self._take_receipt(await live.connection.upload(envelope, held.path))
        except (ConnectionError, ConnectionRefused, ProtocolError) as error:
            _log.debug("delivery_broken", error=str(error))
            live.leave.set()  # the next session delivers it
        except (DeploymentError, OSError) as error:
            # It was withdrawn and removed before it was sent.
            if self._here.held.get(held.key.run_id) != held:
                return
            _log.error("reply_unreadable", round_num=held.key.round_num, error=str(error))
            live.sent_replies.discard(held.key)  # its task is offered and answered again
            self._events.put_nowait(conversation.ReplySettled(held.key))

    def _expand_masks(self, task: OpenTask, state: bytes | None) -> None:
        """Drop earlier masks, and start to expand those that the next message needs, if any."""
        self._masks.drop()
        live = self._connector.live
        if task.key.kind != SECURE_KIND or live is None:
            return
        secure = self._worker.build_secure_client(live.enrolment)
        if secure is not None and state is not None:
            self._masks.follow(secure, state)

    def _take_receipt(self, receipt: wire_pb2.Receipt) -> None:
        key = TaskKey.of(receipt.key)
        if key == self._receipts.get(key.run_id):  # a duplicate, as after it was sent again
            return
        going_on = self._here.run_ids
        self._receipts = {each: it for each, it in self._receipts.items() if each in going_on}
        self._receipts[key.run_id] = key
        kind = _VERDICTS.get(receipt.verdict, EventKind.REFUSED)
        about = {"kind": key.kind, "round_num": key.round_num, "verdict": kind.value}
        if kind is EventKind.REFUSED:
            _log.warning("reply_settled", **about, reason=receipt.reason)
        else:
            _log.info("reply_settled", **about)
        held = self._here.held.get(key.run_id)
        is_update = held is not None and held.key == key and not held.is_failure()
        if kind is not EventKind.ACCEPTED or is_update:  # do not count an accepted failure
            self._on_event(AgentEvent.of(kind, key=key, message=receipt.reason))
        if kind is not EventKind.ACCEPTED:
            self._masks.drop()  # the secure-aggregation session continues without this client
        self._connector.backoff.reset()
        self._events.put_nowait(conversation.ReplySettled(key))
        # If this ended a secure-aggregation session, rotate keys now, before the next one begins.
        self._connector.leave_for_rotation()

    # The device

    def _hello(self) -> wire_pb2.Hello:
        return wire_pb2.Hello(
            software=SOFTWARE,
            eligibility=self._eligibility(self._policy.max_concurrent_runs),
            held=[each.key.message() for each in self._here.held.values()],
            takes_many_runs=True,
            takes_bundles=True,
        )

    def _eligibility(self, max_concurrent_runs: int) -> wire_pb2.Eligibility:
        may_tell_size = self._policy.may_be_read  # otherwise the size may only enter a secure sum
        return wire_pb2.Eligibility(
            num_examples=getattr(self._trainer, "num_examples", 0) if may_tell_size else 0,
            # "cuda" rather than "cuda:1": the index means nothing to the coordinator
            device=str(getattr(self._trainer, "device", "cpu")).partition(":")[0],
            takes_ahead=self._policy.train_ahead,
            studies=sorted(self._home.list_studies(self._policy.studies)),
            bundles=self._bundles.reports(),
            runs_only_bundles=self._trainer is None,
            max_concurrent_runs=max_concurrent_runs,
            **self._facts.select_known(),
        )

    def _report_eligibility(self) -> None:
        if (live := self._connector.live) is not None:
            eligibility = self._eligibility(live.max_concurrent_runs)
            live.send(wire_pb2.FromClient(eligibility=eligibility))

    async def _survey(self) -> None:
        """Check every second for reasons to stop: consent, conditions, deadlines."""
        if self._conditions.idle:  # idleness is measured between two calls, so make the first now
            await asyncio.to_thread(self._device.gather_facts)
            await asyncio.sleep(_SURVEY_S)
        while True:
            facts = await asyncio.to_thread(self._device.gather_facts)
            now_unix_s = self._clock.unix_s()
            unmet = self._conditions.find_unmet(facts, local=local_time(now_unix_s))
            if unmet != self._here.unmet:
                self._report_unmet(unmet)
            if facts != self._facts:
                self._facts = facts
                self._report_eligibility()
            await self._bundles.look()
            self._events.put_nowait(conversation.ConditionsChecked(unmet, now_unix_s))
            self._look_at_certificate(now_unix_s)
            self._look_at_studies()
            self._connector.leave_for_rotation()
            if not self._home.has_consent() and not self._here.is_stopping:
                _log.info("consent_revoked")
                self.stop()
            await asyncio.sleep(_SURVEY_S)

    def _look_at_studies(self) -> None:
        """Tell the coordinator when the owner consents to a study, or withdraws from one.

        Work for a study that the owner has left ends, and its reply is not sent any more.
        """
        before, self._studies = self._studies, self._home.list_studies(self._policy.studies)
        if before == self._studies:
            return
        _log.info("studies", consents=sorted(self._studies))
        self._report_eligibility()
        here = self._here
        tasks = [*(each.task for each in here.work.values()), *here.waiting.values()]
        tasks += [each for each in (here.announced, here.prefetched) if each is not None]
        tasks += [] if here.ready is None else [here.ready.task]
        open_work = [(each.key, each.message.study) for each in tasks]
        open_work += [(each.key, each.study) for each in here.held.values()]
        for key, study in open_work:
            if study in before - self._studies:
                reason = f"the owner has left the study {study}"
                self._events.put_nowait(conversation.TaskWithdrawn(key, reason))
                self._connector.leave()  # the coordinator offers it again, and hears the refusal

    def _look_at_certificate(self, now_unix_s: float) -> None:
        """Warn once a day while the certificate needs to be renewed by hand."""
        enrolment = self._connector.enrolment
        if enrolment is None or now_unix_s < self._next_look_unix_s:
            return
        self._next_look_unix_s = now_unix_s + _LOOK_AT_CERTIFICATE_S
        if (advice := enrolment.describe_renewal(now_unix_s=now_unix_s)) is not None:
            _log.warning("certificate_ends", advice=advice)
            self._on_event(AgentEvent.of(EventKind.EXPIRING, message=advice))

    def _report_unmet(self, unmet: tuple[str, ...]) -> None:
        # An unknown condition never holds, so the client would silently never train: warn.
        log = _log.warning if any("unknown" in each for each in unmet) else _log.info
        log("conditions", unmet=unmet)
        if unmet:
            self._on_event(AgentEvent.of(EventKind.WAITING, message=", ".join(unmet)))


def make_runtime(options: RuntimeOptions, *, on_event: Callable[[AgentEvent], None]) -> Runtime:
    """Apply the resource limits to this process, create the trainer, and build its runtime.

    Exceptions of the trainer propagate.

    Raises:
        DeploymentError: There is no such trainer, or several workers cannot share its training.
    """
    lower_priority(options.resources.niceness)
    torch.set_num_threads(options.resources.num_threads)
    return Runtime(options, make_client_trainer(options), on_event=on_event)
