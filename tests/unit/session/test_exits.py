"""A trainer that calls ``exit`` has failed, in a simulation and in a deployment."""

import asyncio
import threading
from collections.abc import Callable, Mapping

import pytest
from torch import Tensor, nn

from fedlearn.algorithms.local import LocalSgd
from fedlearn.algorithms.settings import settings_of
from fedlearn.core.codec import decode, encode
from fedlearn.core.messages import ClientId, EvaluateRequest, Failure, Reply, Request, TrainRequest
from fedlearn.session.session import ClientSession
from fedlearn.training.trainer import (
    UNATTENDED,
    LocalEvaluation,
    LocalResult,
    TaskControl,
    TrainContext,
)


class Exiting:
    """A trainer that raises what ``except Exception`` does not catch."""

    honors = ("epochs", "batch_size", "learning_rate")

    def __init__(self, error: BaseException) -> None:
        self.error = error

    def train(self, tensors: Mapping[str, Tensor], *, context: TrainContext) -> LocalResult:
        raise self.error

    def evaluate(
        self, tensors: Mapping[str, Tensor], *, control: TaskControl = UNATTENDED
    ) -> LocalEvaluation:
        raise self.error


TENSORS = dict(nn.Linear(2, 1).state_dict())
SETTINGS = settings_of(LocalSgd(epochs=1, batch_size=1, learning_rate=0.1))
TRAIN = TrainRequest(
    round_num=0, attempt=0, tensors=TENSORS, order=tuple(TENSORS), settings=SETTINGS, seed=0
)
EVALUATE = EvaluateRequest(round_num=0, tensors=TENSORS)


def reply_to(request: Request, error: BaseException) -> Reply:
    data, _ = ClientSession(ClientId(1), Exiting(error)).handle(encode(request), b"")
    found = decode(data)
    assert isinstance(found, Failure)
    return found


def start_thread(call: Callable[[], Reply]) -> Reply:
    found = list[Reply]()
    thread = threading.Thread(target=lambda: found.append(call()))
    thread.start()
    thread.join()
    return found[0]


@pytest.mark.parametrize("request_", [TRAIN, EVALUATE])
@pytest.mark.parametrize("error", [SystemExit(3), KeyboardInterrupt(), asyncio.CancelledError()])
def test_an_exit_in_the_training_thread_is_a_failure(
    request_: Request, error: BaseException
) -> None:
    assert start_thread(lambda: reply_to(request_, error)) == Failure(type(error).__name__)


def test_an_exit_in_the_main_thread_is_a_failure_but_ctrl_c_is_not() -> None:
    assert reply_to(TRAIN, SystemExit(0)) == Failure("SystemExit")
    with pytest.raises(KeyboardInterrupt):
        reply_to(TRAIN, KeyboardInterrupt())
