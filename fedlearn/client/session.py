"""One client's side of the protocol; the same code simulated and deployed."""

from collections.abc import Mapping
from dataclasses import dataclass

import safetensors.torch
import structlog
import torch
from torch import Tensor

from fedlearn.client.trainer import UNATTENDED, LocalTrainer, TaskControl, TrainContext
from fedlearn.core.codec import decode, encode
from fedlearn.core.messages import (
    ClientId,
    EvaluateReply,
    EvaluateRequest,
    Failure,
    Reply,
    TrainReply,
    TrainRequest,
)
from fedlearn.core.randomness import Seed
from fedlearn.errors import Cancelled, ProtocolError


@dataclass(frozen=True, eq=False)
class ClientSession:
    """Answers the coordinator's requests with a trainer's results.

    A session holds no state of its own: what a client must remember from one message to
    the next goes in and comes out of :meth:`handle`, because some transports answer each
    message in a fresh process.

    Attributes:
        client_id: This client.
        trainer: What has the data.
    """

    client_id: ClientId
    trainer: LocalTrainer

    def handle(
        self, data: bytes, state: bytes, *, control: TaskControl = UNATTENDED
    ) -> tuple[bytes, bytes]:
        """Answer one encoded request; a failure is an answer, too.

        An error in user code is logged here and reaches the coordinator only as the name
        of its type, since a message could quote the data.

        Args:
            data: The request on the wire.
            state: What this method returned the last time as its second value; empty
                bytes at first.
            control: How the task is called off and watched.

        Returns:
            The reply on the wire, and the state after it (unchanged by a failure).

        Raises:
            Cancelled: ``control`` called the task off: there is no reply, and ``state`` stands.
        """
        try:
            match decode(data):
                case TrainRequest() as request:
                    reply, tensors = self._train(request, _unpack(state), control)
                    return encode(reply), _pack(tensors)
                case EvaluateRequest() as request:
                    return encode(self._evaluate(request, control)), state
                case other:
                    raise ProtocolError(f"{type(other).__name__} is not a request")
        except Cancelled:
            raise
        except Exception as error:  # noqa: BLE001 - the client boundary: one of two in the project
            log = structlog.get_logger(__name__)
            log.warning("request_failed", client_id=self.client_id, error=repr(error))
            return encode(Failure(reason=type(error).__name__)), state

    def _train(
        self, request: TrainRequest, state: Mapping[str, Tensor], control: TaskControl
    ) -> tuple[Reply, Mapping[str, Tensor]]:
        context = TrainContext(
            client_id=self.client_id,
            round_num=request.round_num,
            settings=request.settings,
            seed=Seed(request.seed),
            state=state,
            control=control,
        )
        result = self.trainer.train(request.tensors, context=context)
        delta = {
            name: torch.sub(value, request.tensors[name].to(value))
            for name, value in result.tensors.items()
        }
        reply = TrainReply(
            round_num=request.round_num,
            delta=delta,
            num_examples=result.num_examples,
            metrics=result.metrics,
        )
        return reply, result.state

    def _evaluate(self, request: EvaluateRequest, control: TaskControl) -> Reply:
        result = self.trainer.evaluate(request.tensors, control=control)
        return EvaluateReply(
            round_num=request.round_num,
            num_examples=result.num_examples,
            metrics=result.metrics,
        )


def _pack(tensors: Mapping[str, Tensor]) -> bytes:
    if not tensors:
        return b""
    return safetensors.torch.save({name: t.detach().cpu() for name, t in tensors.items()})


def _unpack(state: bytes) -> Mapping[str, Tensor]:
    return safetensors.torch.load(state) if state else {}
