"""The work on tasks: download the request, check it against the policy, train, and reply."""

import asyncio
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from contextvars import copy_context
from dataclasses import dataclass, field, replace
from enum import Enum, auto
from functools import partial
from pathlib import Path
from typing import NamedTuple, TypeVar

import structlog

from fedlearn.client.bundle_runner import BundleRunner
from fedlearn.client.connecting import Connector
from fedlearn.client.control import WorkControl
from fedlearn.client.conversation import Event, WorkAbandoned, WorkFinished
from fedlearn.client.events import AgentEvent, EventKind
from fedlearn.client.expansion import MaskExpander
from fedlearn.client.fingerprint import fingerprint_of
from fedlearn.client.home import Home
from fedlearn.client.judging import Judge, local_noise_ratio
from fedlearn.client.keyring import Enrolment
from fedlearn.client.policy import Policy
from fedlearn.client.task_folder import TaskFolder
from fedlearn.client.tasks import OpenTask
from fedlearn.client.trainers import SpareTask, SpareTrainers, TrainerEnded
from fedlearn.core.clock import WallClock
from fedlearn.core.codec import encode, peek
from fedlearn.core.cores import count_cores
from fedlearn.core.files import map_file, write_private
from fedlearn.core.kinds import SECURE_KIND
from fedlearn.core.messages import (
    ClientId,
    EvaluateRequest,
    Failure,
    Request,
    SecureEvaluateRequest,
    SecureTrainRequest,
    TrainRequest,
)
from fedlearn.core.tracing import span, span_within
from fedlearn.errors import (
    BundleEnded,
    BundleFailed,
    BundleRefused,
    Cancelled,
    ConnectionRefused,
    DeploymentError,
    PolicyViolation,
    ProtocolError,
)
from fedlearn.secagg.client import SecureClient
from fedlearn.secagg.policy import lane_squared_distance, squared_distance
from fedlearn.session.secure import end_session_after_failure, find_session_to_mask
from fedlearn.session.session import ClientSession, log_refusal
from fedlearn.training.trainer import LocalTrainer
from fedlearn.transport import wire_pb2
from fedlearn.transport.content import TaskKey, compute_digest
from fedlearn.transport.wire import MAX_CONCURRENT_RUNS

#: Number of crashes in one task after which the client gives it up.
_MAX_CRASHES = 3

_log = structlog.get_logger(__name__)

T = TypeVar("T")


class _WorkPlace(Enum):
    """Where a task is worked on."""

    OWN_THREAD = auto()  # by the user's trainer in this process, or in secure aggregation
    BUNDLE = auto()
    SPARE = auto()


class _Download(NamedTuple):
    """A file that a task needs."""

    digest: bytes
    num_bytes: int
    path: Path


@dataclass(frozen=True, kw_only=True)
class Worker:
    """Works on tasks, which train in threads of their own.

    The user's trainer works on one task at a time, always in the same thread. A client that works
    for several runs at a time has other processes for tasks without secure aggregation. Secure
    aggregation stays in this process, where no two of its messages are answered at the same time:
    what a client has helped to open is one history over all runs.

    Attributes:
        home: The client's folder.
        trainer: The user's trainer; ``None``: the client runs only bundles.
        spares: Trainers like it in other processes.
        policy: What the client refuses.
        clock: Dates the entries that count towards daily limits.
        connector: Holds the session, over which large requests are downloaded.
        masks: Masks that were expanded early.
        bundles: Runs the bundles of runs that ship one.
        on_event: Called with each event, in the event loop.
        exit_code: See :class:`~fedlearn.client.options.RuntimeOptions`.
        thread: The thread of the user's trainer, and of secure aggregation.
        threads: The threads of other tasks.
        charging: Held from a look at daily limits to the entry that counts towards them.
    """

    home: Home
    trainer: LocalTrainer | None
    spares: SpareTrainers
    policy: Policy
    clock: WallClock
    connector: Connector
    masks: MaskExpander
    bundles: BundleRunner
    on_event: Callable[[AgentEvent], None]
    exit_code: int | None = None
    thread: ThreadPoolExecutor = field(
        default_factory=partial(ThreadPoolExecutor, 1, thread_name_prefix="fedlearn-training")
    )
    threads: ThreadPoolExecutor = field(
        default_factory=partial(
            ThreadPoolExecutor, MAX_CONCURRENT_RUNS, thread_name_prefix="fedlearn-task"
        )
    )
    charging: threading.Lock = field(default_factory=threading.Lock)

    @property
    def judge(self) -> Judge:
        """The judge that checks requests against the present policy."""
        enrolment = self.connector.enrolment
        assert enrolment is not None  # requests arrive over a session
        history = self.home.keys.history_file(enrolment).read()
        return Judge(self.policy, is_bound=history.is_bound)

    def close(self) -> None:
        """Shut down the threads and processes, without waiting for work in progress."""
        self.spares.close()
        self.thread.shutdown(wait=False)
        self.threads.shutdown(wait=False)

    async def answer(self, task: OpenTask, control: WorkControl) -> Event:
        """Work on one task; every expected error becomes an event."""
        enrolment = self.connector.enrolment
        assert enrolment is not None  # tasks arrive over a session
        with (
            name_task(task.key, enrolment.client_id),
            span_within(
                task.message.traceparent,
                "client.task",
                kind=task.key.kind,
                attempt=task.key.attempt,
            ),
        ):
            try:
                return await self._answer_within_policy(task, control, enrolment)
            except PolicyViolation as violation:
                self._report_refusal(task.key, violation)
                return build_failure(task, str(violation), state=self._end_secure_session(task))
            except (BundleEnded, BundleRefused) as error:
                self._report_failure(task.key, str(error))
                return build_failure(task, str(error), state=self._end_secure_session(task))
            except (BundleFailed, DeploymentError, ProtocolError) as error:
                self._report_failure(task.key, str(error))
                return build_failure(task, type(error).__name__)

    def _end_secure_session(self, task: OpenTask) -> bytes | None:
        """Return the state without the session of ``task``; ``None`` if it does not change."""
        before = self.home.load_state(task.key.run_id)
        after = end_session_after_failure(before) if task.key.kind == SECURE_KIND else before
        return None if after == before else after

    async def _answer_within_policy(
        self, task: OpenTask, control: WorkControl, enrolment: Enrolment
    ) -> Event:
        self.home.open_task(task)
        self.require_allowed(task)
        if words := _explain_loss(self.home.task(task.key.run_id), self.exit_code):
            self._report_failure(task.key, words)
            return build_failure(task, words)
        if not await self._fetch(task, control) or control.is_cancelled:
            return WorkAbandoned(task.key.run_id)
        request = await _run_in(self.threads, partial(self._judge_in_full, task))
        self.on_event(AgentEvent.of(_event_of(request), key=task.key))
        if self.connector.live is not None:
            self.connector.live.report_phase(task.key, wire_pb2.Progress.TRAINING)
        place = self._choose_place(task, request)
        threads = self.thread if place is _WorkPlace.OWN_THREAD else self.threads
        make_session = self._make_session(task, enrolment)
        work = partial(self._work, task, make_session, control, is_spare=place is _WorkPlace.SPARE)
        return await _run_in(threads, work)

    def _choose_place(self, task: OpenTask, request: Request | None) -> "_WorkPlace":
        """Choose where a task is worked on; secure aggregation waits for no plain training."""
        if isinstance(request, TrainRequest | EvaluateRequest):
            if task.message.bundle:
                return _WorkPlace.BUNDLE
            if self.policy.max_concurrent_runs > 1:
                return _WorkPlace.SPARE
        return _WorkPlace.OWN_THREAD

    def _make_session(
        self, task: OpenTask, enrolment: Enrolment
    ) -> Callable[[LocalTrainer], ClientSession]:
        loop = asyncio.get_running_loop()
        return lambda trainer: ClientSession(
            enrolment.client_id,
            trainer,
            self.build_secure_client(enrolment),
            on_refusal=lambda words: loop.call_soon_threadsafe(
                self._report_refusal, task.key, words
            ),
            on_failure=lambda words: loop.call_soon_threadsafe(
                self._report_failure, task.key, words
            ),
            pin_file=self.home.keys.pin_file(enrolment),
            history_file=self.home.keys.history_file(enrolment),
            find_masks=self.masks.take,
        )

    def _work(
        self,
        task: OpenTask,
        make_session: Callable[[LocalTrainer], ClientSession],
        control: WorkControl,
        *,
        is_spare: bool,
    ) -> Event:
        """Work on a task in a thread, with its trainer, and note what the client says it is."""
        if digest := task.message.bundle.hex():
            with self.bundles.lend(digest, run_id=task.key.run_id) as bundle:
                event, ran = self._train(task, make_session(bundle), control), f"bundle:{digest}"
        elif self.trainer is None:
            raise BundleRefused("the client has no trainer of its own, and the run ships no bundle")
        else:
            event = self._train(task, make_session(self.trainer), control, is_spare=is_spare)
            ran = fingerprint_of(self.trainer)
        return replace(event, trainer=ran) if isinstance(event, WorkFinished) else event

    def require_allowed(self, task: OpenTask) -> None:
        """Check what is known of a task before its request is downloaded.

        Raises:
            PolicyViolation: The policy forbids the task, whatever its request contains, or the
                owner does not consent to its study.
        """
        study = task.message.study
        if study and study not in self.home.list_studies(self.policy.studies):
            raise PolicyViolation(
                rule="policy.studies",
                asked=f"a task of the study {study[:64]!r}",
                limit="studies that its owner consents to",
            )
        now_unix_s = self.clock.unix_s()
        self.judge.check_announcement(
            task.key.kind,
            settings=None,
            num_tasks_today=self.home.num_tasks_today(now_unix_s, without=task.key.run_id),
            num_evaluations_today=self.home.num_evaluations_today(
                now_unix_s, without=task.key.run_id
            ),
        )

    def build_secure_client(self, enrolment: Enrolment) -> SecureClient | None:
        """Build the client's side of secure aggregation; ``None`` without a coordinator key."""
        return Judge(self.policy).build_secure_client(
            enrolment.client_id,
            enrolment.identity,
            coordinator_key=enrolment.invitation.coordinator_key,
            num_threads=count_cores(),
            spent=self.home.sum_spent_today(self.clock.unix_s()),
        )

    def _judge_in_full(self, task: OpenTask) -> Request | None:
        """Check the request on disk, in a thread; ``None`` if it is not valid."""
        now_unix_s, run_id = self.clock.unix_s(), task.key.run_id
        folder = self.home.task(run_id)
        with span("client.check_request"):
            return self.judge.check_request(
                map_file(folder.request),
                num_tasks_today=self.home.num_tasks_today(now_unix_s, without=run_id),
                num_evaluations_today=self.home.num_evaluations_today(now_unix_s, without=run_id),
                spent=self.home.sum_spent_today(now_unix_s, without=folder.training_id),
            )

    async def _fetch(self, task: OpenTask, control: WorkControl) -> bool:
        """Write the request and its model's constants to disk; return whether both are complete."""
        message, request = task.message, self.home.task(task.key.run_id).request
        if message.constants_digest:
            path = self.home.prepare_constants(message.constants_digest, run_id=task.key.run_id)
            constants = _Download(message.constants_digest, message.constants_bytes, path)
            if not await self._download(constants, task, control):
                return False
        if message.data:
            if compute_digest(message.data) != message.digest:
                raise ProtocolError("the request's bytes do not match the announced digest")
            write_private(request, message.data)
            return True
        wanted = _Download(message.digest, message.num_bytes, request)
        return await self._download(wanted, task, control)

    async def _download(self, wanted: "_Download", task: OpenTask, control: WorkControl) -> bool:
        """Download the missing part of a file; return whether it is complete."""
        missing = wanted.num_bytes - (wanted.path.stat().st_size if wanted.path.exists() else 0)
        self.home.require_space(max(0, missing))
        live = self.connector.live
        if live is None:
            return False
        if missing > 0:
            self.on_event(AgentEvent.of(EventKind.DOWNLOADING, key=task.key))
            live.report_phase(task.key, wire_pb2.Progress.DOWNLOADING)
        job = control.download = live.spawn(
            live.connection.download(wanted.digest, num_bytes=wanted.num_bytes, path=wanted.path)
        )
        # `wait`, unlike `await`, does not raise: the job may be cancelled with its session while
        # this task continues.
        with span("client.download", num_bytes=max(0, missing)):
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
        self,
        task: OpenTask,
        session: ClientSession,
        control: WorkControl,
        *,
        is_spare: bool = False,
    ) -> Event:
        """Answer the request on disk."""
        folder, before = self.home.task(task.key.run_id), self.home.load_state(task.key.run_id)
        request = self._charge(task, before)
        handle = self._handle_in_spare if is_spare else self._handle
        while True:
            try:
                with span(f"client.{_name_work(request)}"):
                    reply, state = handle(task, session, before, control)
                break
            except Cancelled:
                return WorkAbandoned(task.key.run_id)
            except TrainerEnded as ended:
                folder.begin_work()  # which did not end
                if words := _explain_loss(folder, ended.code):
                    session.on_failure(words)
                    return build_failure(task, words)
        most = task.message.max_reply_bytes
        if 0 < most < len(reply):
            words = f"the reply has {len(reply)} bytes, but the coordinator accepts at most {most}"
            session.on_failure(words)
            return build_failure(task, words)
        is_failure = isinstance(peek(reply), Failure)
        return WorkFinished(task, reply, None if state == before else state, is_failure)

    def _handle(
        self, task: OpenTask, session: ClientSession, before: bytes, control: WorkControl
    ) -> tuple[bytes, bytes]:
        folder, constants = self.home.task(task.key.run_id), self._find_constants(task)
        folder.begin_work()
        try:
            return session.handle(
                folder.request.read_bytes(),
                before,
                personal=task.message.personal,
                constants=b"" if constants is None else map_file(constants),
                control=control,
            )
        finally:
            # Also after an error: only a process that dies leaves the count increased.
            folder.end_work()

    def _handle_in_spare(
        self, task: OpenTask, session: ClientSession, before: bytes, control: WorkControl
    ) -> tuple[bytes, bytes]:
        spare_task = SpareTask(
            client_id=session.client_id,
            folder=self.home.task(task.key.run_id).folder,
            state=before,
            personal=task.message.personal,
            constants=self._find_constants(task),
        )
        with self.spares.borrow() as spare:
            return spare.handle(spare_task, control=control, on_failure=session.on_failure)

    def _find_constants(self, task: OpenTask) -> Path | None:
        digest, run_id = task.message.constants_digest, task.key.run_id
        return self.home.prepare_constants(digest, run_id=run_id) if digest else None

    def _charge(self, task: OpenTask, before: bytes) -> Request | None:
        """Check the request again, and count and charge it before the work begins.

        A crash cannot evade the limits then, and neither can two tasks at the same time.

        Raises:
            PolicyViolation: The policy forbids it, because of what was counted since.
        """
        run_id, now_unix_s = task.key.run_id, self.clock.unix_s()
        with self.charging:
            request = self._judge_in_full(task)
            if isinstance(request, TrainRequest | SecureTrainRequest):
                self.home.count_task(run_id, now_unix_s)
            elif isinstance(request, EvaluateRequest | SecureEvaluateRequest):
                self.home.count_evaluation(run_id, now_unix_s)
            if isinstance(request, TrainRequest):
                self._charge_update(task, request)
            elif isinstance(request, SecureTrainRequest | SecureEvaluateRequest):
                self._charge_sum(before)
        return request

    def _charge_update(self, task: OpenTask, request: TrainRequest) -> None:
        """Charge the daily ε budget for an update that has its own noise."""
        if share := local_noise_ratio(request.settings):
            squared = lane_squared_distance(share)
            training_id = self.home.task(task.key.run_id).training_id
            self.home.spend(training_id, squared, self.clock.unix_s())

    def _charge_sum(self, state: bytes) -> None:
        """Charge the daily ε budget for the noisy sum to which this client is about to contribute.

        Each session is charged separately. A session's id covers this client's fresh keys, so
        repeating the same terms, even with another roster, is another session.

        Raises:
            PolicyViolation: The budget is used up, because of other charges since this client
                agreed to the terms.
        """
        session = find_session_to_mask(state)
        if session is None or not all(lane.noise for lane in session.terms.lanes):
            return
        now_unix_s = self.clock.unix_s()
        spent = self.home.sum_spent_today(now_unix_s, without=session.id)
        self.judge.build_terms_policy(spent).judge_noise(session.terms)
        corruption = self.policy.secure_aggregation.corruption
        squared = squared_distance(session.terms, corruption=corruption)
        self.home.spend(session.id, squared, now_unix_s)

    def _report_refusal(self, key: TaskKey, violation: PolicyViolation) -> None:
        log_refusal(violation, round_num=key.round_num)
        self.on_event(AgentEvent.of(EventKind.POLICY, key=key, message=str(violation)))

    def _report_failure(self, key: TaskKey, words: str) -> None:
        # To the user only: `words` may quote the data, so the coordinator gets the error's type.
        _log.error("task_failed", round_num=key.round_num, error=words)
        self.on_event(AgentEvent.of(EventKind.FAILED, key=key, message=words))


@contextmanager
def name_task(key: TaskKey, client_id: ClientId) -> Iterator[None]:
    """Let log lines and spans in the block name a task's run, by its id, round and client."""
    about = {"run": key.run_id, "round_num": key.round_num, "client_id": client_id}
    with structlog.contextvars.bound_contextvars(**about):
        yield


async def _run_in(threads: ThreadPoolExecutor, call: Callable[[], T]) -> T:
    """Run a call in a thread, where logs and traces name the same task."""
    run = partial(copy_context().run, call)
    return await asyncio.get_running_loop().run_in_executor(threads, run)


def _event_of(request: Request | None) -> EventKind:
    """Return what a client does next with a request; ``None`` is one that its session refuses."""
    match request:
        case EvaluateRequest() | SecureEvaluateRequest():
            return EventKind.EVALUATING
        case TrainRequest() | SecureTrainRequest() | None:
            return EventKind.TRAINING
        case _:
            return EventKind.SUMMING


def _explain_loss(folder: TaskFolder, code: int | None) -> str:
    """Explain why to give up a task after crashes; empty to try it again.

    A trainer that exited would do so again, so the coordinator should not wait for it. One that
    was killed by a signal, for example because memory was short, resumes from its checkpoint once.

    Args:
        folder: The folder of the task.
        code: Exit code of the process that was lost; negative for a signal; ``None``: there was
            none.
    """
    num_crashes = folder.num_crashes
    if num_crashes and code is not None:
        may_resume = code < 0 and num_crashes == 1 and bool(folder.load_checkpoint())
        if not may_resume:
            how = f"exit code {code}" if code >= 0 else f"killed by signal {-code}"
            return f"the training process ended during this task ({how})"
    if num_crashes >= _MAX_CRASHES:
        return f"the client's process crashed {_MAX_CRASHES} times during this task"
    return ""


def _name_work(request: Request | None) -> str:
    match request:
        case TrainRequest() | SecureTrainRequest():
            return "train"
        case EvaluateRequest() | SecureEvaluateRequest():
            return "evaluate"
    return "secure_stage"


def build_failure(task: OpenTask, reason: str, *, state: bytes | None = None) -> WorkFinished:
    """Build the event that answers a task with a failure; ``state`` as in :class:`WorkFinished`."""
    return WorkFinished(task, encode(Failure(reason)), state, is_failure=True)
