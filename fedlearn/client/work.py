"""The work on one task: download the request, check it against the policy, train, and reply."""

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from mmap import mmap
from pathlib import Path
from typing import NamedTuple

import structlog

from fedlearn.client.connecting import Connector
from fedlearn.client.control import WorkControl
from fedlearn.client.conversation import Event, WorkAbandoned, WorkFinished
from fedlearn.client.events import AgentEvent, EventKind
from fedlearn.client.expansion import MaskExpander
from fedlearn.client.home import Home
from fedlearn.client.judging import Judge, local_noise_ratio
from fedlearn.client.keyring import Enrolment
from fedlearn.client.policy import Policy
from fedlearn.client.tasks import OpenTask
from fedlearn.core.clock import WallClock
from fedlearn.core.codec import encode, peek
from fedlearn.core.cores import count_cores
from fedlearn.core.files import map_file, write_private
from fedlearn.core.kinds import SECURE_KIND
from fedlearn.core.messages import (
    EvaluateRequest,
    Failure,
    Request,
    SecureEvaluateRequest,
    SecureTrainRequest,
    TrainRequest,
)
from fedlearn.errors import (
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

#: Number of crashes in one task after which the client gives it up.
_MAX_CRASHES = 3

_log = structlog.get_logger(__name__)


class _Download(NamedTuple):
    """A file that a task needs."""

    digest: bytes
    num_bytes: int
    path: Path


@dataclass(frozen=True, kw_only=True)
class Worker:
    """Works on one task at a time, training on a separate thread.

    Attributes:
        home: The client's folder.
        trainer: The user's trainer.
        policy: What the client refuses.
        clock: Dates the entries that count towards daily limits.
        connector: Holds the session, over which large requests are downloaded.
        masks: Masks that were expanded early.
        on_event: Called with each event, in the event loop.
        exit_code: See :class:`~fedlearn.client.options.RuntimeOptions`.
        thread: The training thread.
    """

    home: Home
    trainer: LocalTrainer
    policy: Policy
    clock: WallClock
    connector: Connector
    masks: MaskExpander
    on_event: Callable[[AgentEvent], None]
    exit_code: int | None = None
    thread: ThreadPoolExecutor = field(
        default_factory=partial(ThreadPoolExecutor, 1, thread_name_prefix="fedlearn-training")
    )

    @property
    def judge(self) -> Judge:
        """The judge that checks requests against the present policy."""
        enrolment = self.connector.enrolment
        assert enrolment is not None  # requests arrive over a session
        history = self.home.keys.history_file(enrolment).read()
        return Judge(self.policy, is_bound=history.is_bound)

    def close(self) -> None:
        """Shut down the training thread, without waiting for work in progress."""
        self.thread.shutdown(wait=False)

    async def answer(self, task: OpenTask, control: WorkControl) -> Event:
        """Work on one task; every expected error becomes an event."""
        try:
            return await self._answer_within_policy(task, control)
        except PolicyViolation as violation:
            self._report_refusal(task.key, violation)
            return build_failure(task, str(violation), state=self._end_secure_session(task))
        except (DeploymentError, ProtocolError) as error:
            self._report_failure(task.key, str(error))
            return build_failure(task, type(error).__name__)

    def _end_secure_session(self, task: OpenTask) -> bytes | None:
        """Return the state without the session of ``task``; ``None`` if it does not change."""
        before = self.home.load_state(task.key.run_id)
        after = end_session_after_failure(before) if task.key.kind == SECURE_KIND else before
        return None if after == before else after

    async def _answer_within_policy(self, task: OpenTask, control: WorkControl) -> Event:
        enrolment = self.connector.enrolment
        assert enrolment is not None  # tasks arrive over a session
        num_crashes = self.home.open_task(task)
        self.require_allowed(task)
        if words := self._explain_loss(num_crashes):
            self._report_failure(task.key, words)
            return build_failure(task, words)
        if not await self._fetch(task, control) or control.is_cancelled:
            return WorkAbandoned()
        loop = asyncio.get_running_loop()
        request = await loop.run_in_executor(self.thread, self._judge_in_full)
        is_evaluation = isinstance(request, EvaluateRequest | SecureEvaluateRequest)
        kind = EventKind.EVALUATING if is_evaluation else EventKind.TRAINING
        self.on_event(AgentEvent.of(kind, key=task.key))
        if self.connector.live is not None:
            self.connector.live.report_phase(task.key, wire_pb2.Progress.TRAINING)

        session = ClientSession(
            enrolment.client_id,
            self.trainer,
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
        work = partial(self._train, task, session, control, request)
        return await loop.run_in_executor(self.thread, work)

    def _explain_loss(self, num_crashes: int) -> str:
        """Explain why to give up a task after crashes; empty to try it again.

        A trainer that exited would do so again, so the coordinator should not wait for it. One that
        was killed by a signal, for example because memory was short, resumes from its checkpoint
        once.
        """
        code = self.exit_code
        if num_crashes and code is not None:
            may_resume = code < 0 and num_crashes == 1 and bool(self.home.load_checkpoint())
            if not may_resume:
                how = f"exit code {code}" if code >= 0 else f"killed by signal {-code}"
                return f"the training process ended during this task ({how})"
        if num_crashes >= _MAX_CRASHES:
            return f"the client's process crashed {_MAX_CRASHES} times during this task"
        return ""

    def require_allowed(self, task: OpenTask) -> None:
        """Check what is known of a task before its request is downloaded.

        Raises:
            PolicyViolation: The policy forbids the task, whatever its request contains.
        """
        now_unix_s = self.clock.unix_s()
        self.judge.check_announcement(
            task.key.kind,
            settings=None,
            num_tasks_today=self.home.num_tasks_today(now_unix_s),
            num_evaluations_today=self.home.num_evaluations_today(now_unix_s),
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

    def _judge_in_full(self) -> Request | None:
        """Check the request on disk, in the training thread; ``None`` if it is not valid."""
        now_unix_s = self.clock.unix_s()
        return self.judge.check_request(
            map_file(self.home.request),
            num_tasks_today=self.home.num_tasks_today(now_unix_s),
            num_evaluations_today=self.home.num_evaluations_today(now_unix_s),
            spent=self.home.sum_spent_today(now_unix_s, without=self.home.training_id),
        )

    async def _fetch(self, task: OpenTask, control: WorkControl) -> bool:
        """Write the request and its model's constants to disk; return whether both are complete."""
        message = task.message
        if message.constants_digest:
            path = self.home.prepare_constants(message.constants_digest)
            constants = _Download(message.constants_digest, message.constants_bytes, path)
            if not await self._download(constants, task, control):
                return False
        if message.data:
            if compute_digest(message.data) != message.digest:
                raise ProtocolError("the request's bytes do not match the announced digest")
            write_private(self.home.request, message.data)
            return True
        wanted = _Download(message.digest, message.num_bytes, self.home.request)
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
        request: Request | None,
    ) -> Event:
        """Answer the request on disk; runs in the training thread."""
        data = self.home.request.read_bytes()
        before = self.home.load_state(task.key.run_id)
        # Count and charge before the work begins, so that a crash cannot evade the limits.
        if isinstance(request, TrainRequest | SecureTrainRequest):
            self.home.count_task(self.clock.unix_s())
        elif isinstance(request, EvaluateRequest | SecureEvaluateRequest):
            self.home.count_evaluation(self.clock.unix_s())
        if isinstance(request, TrainRequest):
            self._charge_update(request)
        elif isinstance(request, SecureTrainRequest | SecureEvaluateRequest):
            self._charge_sum(before)
        self.home.begin_work()
        try:
            reply, state = session.handle(
                data,
                before,
                personal=task.message.personal,
                constants=self._load_constants(task),
                control=control,
            )
        except Cancelled:
            return WorkAbandoned()
        finally:
            # Also after an error: only a process that dies leaves the count increased.
            self.home.end_work()
        most = task.message.max_reply_bytes
        if 0 < most < len(reply):
            words = f"the reply has {len(reply)} bytes, but the coordinator accepts at most {most}"
            session.on_failure(words)
            return build_failure(task, words)
        is_failure = isinstance(peek(reply), Failure)
        return WorkFinished(task, reply, None if state == before else state, is_failure)

    def _load_constants(self, task: OpenTask) -> bytes | mmap:
        digest = task.message.constants_digest
        return map_file(self.home.prepare_constants(digest)) if digest else b""

    def _charge_update(self, request: TrainRequest) -> None:
        """Charge the daily ε budget for an update that has its own noise."""
        if share := local_noise_ratio(request.settings):
            squared = lane_squared_distance(share)
            self.home.spend(self.home.training_id, squared, self.clock.unix_s())

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


def build_failure(task: OpenTask, reason: str, *, state: bytes | None = None) -> WorkFinished:
    """Build the event that answers a task with a failure; ``state`` as in :class:`WorkFinished`."""
    return WorkFinished(task, encode(Failure(reason)), state, is_failure=True)
