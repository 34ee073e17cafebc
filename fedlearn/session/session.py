"""One client's side of the protocol; the same code simulated and deployed."""

import traceback
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, replace
from mmap import mmap

import structlog
from torch import Tensor

from fedlearn.algorithms.download_compression import restore_model
from fedlearn.algorithms.extra_settings import split_settings
from fedlearn.algorithms.knn_per import find_neighbors
from fedlearn.algorithms.local_parts import LOCAL, insert_local
from fedlearn.algorithms.personal_models import build_personal_model, name_personal
from fedlearn.algorithms.settings import update_from, without_transforms
from fedlearn.algorithms.transforms import Transform
from fedlearn.core.codec import decode, encode
from fedlearn.core.messages import (
    Accusation,
    ClientId,
    EvaluateReply,
    EvaluateRequest,
    Failure,
    Reply,
    SecureEvaluateRequest,
    SecureReply,
    SecureRequest,
    SecureStageRequest,
    SecureTermsRequest,
    SecureTrainRequest,
    TrainReply,
    TrainRequest,
)
from fedlearn.core.own_lines import describe_error
from fedlearn.core.randomness import Seed
from fedlearn.errors import (
    AggregationAborted,
    BundleEnded,
    BundleRefused,
    Cancelled,
    FedlearnError,
    ModelMismatch,
    PolicyViolation,
    ProcessesParted,
    ProtocolError,
    SettingsRefused,
    UnusableResult,
)
from fedlearn.secagg import messages
from fedlearn.secagg.client import FindMasks, SecureClient, find_no_masks
from fedlearn.secagg.draw import RosterDraw
from fedlearn.secagg.plan import hash_request
from fedlearn.secagg.releases import PastReleases
from fedlearn.secagg.session import Stage
from fedlearn.secagg.terms import Contribution, Terms
from fedlearn.session.faults import is_failure
from fedlearn.session.history import HistoryFile
from fedlearn.session.pins import PinFile, Pins
from fedlearn.session.results import build_evaluate_reply, fine_tune, train_and_reply
from fedlearn.session.secure import (
    SessionState,
    bound_metrics,
    bound_update,
    decode_message,
    end_session_after_failure,
)
from fedlearn.training.trainer import (
    UNATTENDED,
    CancelOnly,
    LocalTrainer,
    NeighborEvaluator,
    TaskControl,
    TrainContext,
)


def log_refusal(violation: PolicyViolation, *, round_num: int | None = None) -> None:
    """Log a refusal: the rule, what was asked, and what is allowed."""
    structlog.get_logger(__name__).warning(
        "refused_by_policy",
        rule=violation.rule,
        asked=violation.asked,
        limit=violation.limit,
        round_num=round_num,
    )


def ignore_failure(words: str) -> None:
    """Ignore a failure, which is already in the log."""


def log_bounded_values(contribution: Contribution) -> None:
    """Log, on this device only, which values of a contribution exceeded their bounds."""
    log = structlog.get_logger(__name__)
    if contribution.clipped:
        advice = "the coordinator can increase secure_aggregation.clip_norm"
        log.info("update_scaled_down", lanes=list(contribution.clipped), advice=advice)
    if contribution.capped:
        advice = "the coordinator can increase secure_aggregation.max_loss or max_examples"
        log.info("values_cut_off", lanes=list(contribution.capped), advice=advice)


def describe_publicly(error: BaseException) -> str:
    """Describe an error for the coordinator.

    The few errors whose message says what to fix and quotes no data are sent with it. Of any other
    error, which may come from custom code, the coordinator learns only the type.
    """
    if isinstance(
        error,
        AggregationAborted
        | BundleEnded
        | BundleRefused
        | ModelMismatch
        | ProcessesParted
        | SettingsRefused
        | UnusableResult,
    ):
        return str(error)
    return type(error).__name__


@dataclass(frozen=True, eq=False)
class ClientSession:
    """Answers the coordinator's requests with a trainer's results.

    A session is stateless: what a client must remember from one message to the next goes into
    and comes out of :meth:`handle`, because some transports answer each message in a fresh
    process.

    Attributes:
        client_id: This client.
        trainer: The trainer, which holds the data.
        secure: The client's identity, directory and policy for secure aggregation; ``None`` if it
            takes part in none.
        on_refusal: Called with each request refused by the secure-aggregation policy, before the
            reply is sent. Other policies are enforced by the caller, before :meth:`handle`.
        on_failure: Called with a description of each failure and its location. It may quote the
            data, so it must stay on this device.
        pin_file: Keeps the identity keys of other clients across runs; ``None`` keeps them in the
            client's state.
        history_file: Likewise keeps the sums that this client has helped to open.
        find_masks: Masks that were expanded while the client waited for the network.
        transforms: Custom transform classes that the coordinator may ask for, in addition
            to the trainer's ``own_transforms``.
        on_bounded: Called with each contribution to a secure sum, which names the values that
            exceeded their bounds. Those say something about the data, so a deployment's
            coordinator does not learn them.
        reason_of: Describes a failure for the coordinator. A simulation has nothing to hide.
    """

    client_id: ClientId
    trainer: LocalTrainer
    secure: SecureClient | None = None
    on_refusal: Callable[[PolicyViolation], object] = log_refusal
    on_failure: Callable[[str], object] = ignore_failure
    pin_file: PinFile | None = None
    history_file: HistoryFile | None = None
    find_masks: FindMasks = find_no_masks
    transforms: Collection[type[Transform]] = ()
    on_bounded: Callable[[Contribution], object] = log_bounded_values
    reason_of: Callable[[BaseException], str] = describe_publicly

    def handle(
        self,
        data: bytes,
        state: bytes,
        *,
        personal: bytes = b"",
        constants: bytes | mmap = b"",
        control: TaskControl = UNATTENDED,
    ) -> tuple[bytes, bytes]:
        """Answer one encoded request; a failure is also encoded as a reply.

        An error in custom code is logged here with its traceback. By default the coordinator learns
        only its type, since the message could quote the data.

        Args:
            data: The encoded request.
            state: The second value that this method returned last time; empty bytes at first.
            personal: The part of the request for this client only, if the transport sent it
                separately from ``data``.
            constants: The model's tensors that stay the same throughout a run, if the transport
                sent them separately: see :func:`fedlearn.core.codec.split`.
            control: Cancels the task and observes its progress.

        Returns:
            The encoded reply and the new state. A failure leaves the state unchanged, except that
            it ends a session of secure aggregation. The state must be durable before the reply is
            sent, and no state may be used to answer twice.

        Raises:
            Cancelled: ``control`` cancelled the task: there is no reply, and ``state`` is still
                current.
        """
        try:
            match decode(data, personal=personal, constants=constants):
                case TrainRequest() as request:
                    # First: the request also says whether the last update counted.
                    kept = SessionState.of(state).settle(request, self.client_id)
                    reply, tensors = self._train(request, kept.trainer, control)
                    return encode(reply), kept.record_training(request, tensors).to_bytes()
                case EvaluateRequest() as request:
                    kept = SessionState.of(state)
                    return encode(self._evaluate(request, kept, control)), state
                case (
                    SecureTermsRequest()
                    | SecureTrainRequest()
                    | SecureEvaluateRequest()
                    | SecureStageRequest()
                ) as request:
                    answer, kept = self._take_part(request, SessionState.of(state), control)
                    return encode(answer), kept.to_bytes()
                case other:
                    raise ProtocolError(f"{type(other).__name__} is not a request")
        # Not a failure: a cancelled task has no reply.
        except Cancelled:
            raise
        except PolicyViolation as violation:
            self.on_refusal(violation)
            return encode(Failure(reason=str(violation))), end_session_after_failure(state)
        except BaseException as error:  # the client boundary: one of three in the project
            if not is_failure(error):
                raise
            self._report_failure(error)
            return encode(self._build_failure(error)), end_session_after_failure(state)

    def _build_failure(self, error: BaseException) -> Failure:
        """Build the failure reply; it accuses another client if that client caused the failure."""
        reason = self.reason_of(error)
        if isinstance(error, AggregationAborted) and error.culprits:
            # A reply names one client; the smallest id makes the choice reproducible.
            return Accusation(reason=reason, client_id=ClientId(min(error.culprits)))
        return Failure(reason=reason)

    def _report_failure(self, error: BaseException) -> None:
        # Plain text, without the values of local variables, which are the data.
        lines = [] if isinstance(error, FedlearnError) else traceback.format_exception(error)
        trace = {"exception": "".join(lines)} if lines else {}
        log = structlog.get_logger(__name__)
        log.warning("request_failed", client_id=self.client_id, error=repr(error), **trace)
        self.on_failure(describe_error(error))

    def _take_part(
        self, request: SecureRequest, kept: SessionState, control: TaskControl
    ) -> tuple[Reply, SessionState]:
        """Answer one secure-aggregation message; the update leaves only clipped and masked."""
        if self.secure is None:
            raise AggregationAborted(
                stage=Stage.ADVERTISE,
                reason="this client was enrolled without the coordinator's key; invite it again",
            )
        trained = kept

        def contribute(terms: Terms) -> Contribution:
            match request:
                # The signed terms name the request by its hash, so another model cannot be slipped
                # in.
                case SecureTrainRequest(train=train) if hash_request(train) == terms.request_hash:
                    nonlocal trained
                    begun = kept.settle(train, self.client_id)
                    update, trainer = self._train(train, begun.trainer, control, is_masked=True)
                    trained = begun.record_training(train, trainer)
                    added = bound_update(terms, update)
                    self.on_bounded(added)
                    return added
                case SecureEvaluateRequest(evaluate=evaluate) if (
                    hash_request(evaluate) == terms.request_hash
                ):
                    added = bound_metrics(terms, self._evaluate(evaluate, kept, control))
                    self.on_bounded(added)
                    return added
            raise ProtocolError("the request is not the one that the terms name")

        # 1. Which keys to trust.
        request_message = decode_message(request)
        before = kept.pins if self.pin_file is None else self.pin_file.read()
        lineages = dict(request.directory) if isinstance(request, SecureStageRequest) else {}
        lineages.pop(self.client_id, None)  # this client knows its own key
        pins, given = before.follow(lineages), self.secure.directory
        # Keys that were configured in advance take precedence over those the coordinator sends.
        # Without pins the directory is not copied: a simulated one derives each key on access.
        directory = {**pins.keys, **given} if pins.clients else given
        secure = replace(self.secure, directory=directory, draw=self._build_draw(pins))
        # 2. Answer, with what this client remembers of earlier sums.
        state = kept.find_session(request_message)
        history = None if self.history_file is None else self.history_file.read()
        if history is not None:
            state = replace(state, releases=history.releases)
        answered, session = secure.handle(
            request_message, state, contribute=contribute, find_masks=self.find_masks
        )
        reply = SecureReply(round_num=request.round_num, message=messages.encode(answered))
        # 3. What outlives the run goes to files, before the answer leaves.
        if self.pin_file is None:
            trained = replace(trained, pins=pins)
        elif pins != before:
            self.pin_file.write(pins)
        if self.history_file is not None and history is not None:
            after = history.record_answer(answered, session.releases)
            if after != history:
                self.history_file.write(after)  # before the answer leaves
            session = replace(session, releases=PastReleases())  # the file is the only copy
        return reply, replace(trained, session=session)

    def _build_draw(self, pins: Pins) -> RosterDraw | None:
        """Return the rule for which clients may be asked, if the pins come from a roster."""
        if not pins.roster or self.secure is None:
            return None
        factor = self.secure.policy.max_draw_factor
        return RosterDraw(roster=pins.roster, client_ids=pins.clients.keys(), factor=factor)

    def _evaluate(
        self, request: EvaluateRequest, kept: SessionState, control: TaskControl
    ) -> EvaluateReply:
        """Evaluate the global model, and the personal or fine-tuned one if there is any."""
        result = self.trainer.evaluate(request.tensors, control=control)
        reply = build_evaluate_reply(result, round_num=request.round_num)
        if not (request.local or request.settings or request.fine_tuning):
            return reply
        local = None
        # A trainer of the user's own has no local update; its state is its own business.
        if request.settings and hasattr(self.trainer, "own_updates"):
            settings, _ = split_settings(request.settings)
            local = update_from(settings, known=self.trainer.own_updates)
        if local is None and not (request.local or request.fine_tuning):
            # Only the local update knows the personal model: do not report the global one as it.
            return reply
        tensors = build_personal_model(
            request.tensors,
            kept.find_counted(request, self.client_id),
            local_names=request.local,
            trained_names=request.trained,
            local=local,
        )
        if request.fine_tuning:
            settings, extra = split_settings(request.fine_tuning)
            context = TrainContext(
                client_id=self.client_id,
                round_num=request.round_num,
                settings=settings,
                extra=extra,
                seed=Seed(request.seed),
                state={},
                control=CancelOnly(control),
            )
            tensors = fine_tune(self.trainer, tensors, context=context)
        personal, neighbors = reply, None if local is None else find_neighbors(local)
        if tensors is not request.tensors or neighbors is not None:
            if neighbors is None:
                result = self.trainer.evaluate(tensors, control=control)
            elif isinstance(self.trainer, NeighborEvaluator):
                result = self.trainer.evaluate_with_neighbors(tensors, neighbors, control=control)
            else:
                raise SettingsRefused(
                    f"{type(self.trainer).__name__} has no method evaluate_with_neighbors, so it "
                    "cannot let neighbors vote; inherit from TorchTrainer, or define it"
                )
            personal = build_evaluate_reply(result, round_num=request.round_num)
        return replace(reply, metrics={**reply.metrics, **name_personal(personal.metrics)})

    def _train(
        self,
        request: TrainRequest,
        state: Mapping[str, Tensor],
        control: TaskControl,
        *,
        is_masked: bool = False,
    ) -> tuple[TrainReply, Mapping[str, Tensor]]:
        known = (*self.transforms, *getattr(self.trainer, "own_transforms", ()))
        request = restore_model(request, known=known)
        settings, extra = split_settings(without_transforms(request.settings, known=known))
        context = TrainContext(
            client_id=self.client_id,
            round_num=request.round_num,
            settings=settings,
            extra=extra,
            seed=Seed(request.seed),
            state={name: value for name, value in state.items() if name != LOCAL},
            broadcast=request.broadcast,
            control=control,
        )
        own = state.get(LOCAL)
        if request.local and own is not None:
            request = replace(request, tensors=insert_local(request.tensors, request.local, own))
        trainer = self.trainer
        if not request.tensors:  # a query, which has no model
            trainer = getattr(trainer, "answers", None) or trainer
        return train_and_reply(trainer, request, context=context, known=known, is_masked=is_masked)
