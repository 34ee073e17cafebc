"""Extra clients that fill up the cohort of the client under test, each with its own runtime."""

import asyncio
import threading
from collections.abc import Collection, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

from torch import Tensor

from fedlearn.algorithms.extra_settings import EXTRA
from fedlearn.algorithms.settings import settings_names
from fedlearn.client.events import AgentEvent, EventKind
from fedlearn.client.home import Home
from fedlearn.client.options import RuntimeOptions
from fedlearn.client.policy import Policy, SecureAggregationPolicy
from fedlearn.client.runtime import Runtime
from fedlearn.errors import DeploymentError
from fedlearn.training.trainer import (
    LocalEvaluation,
    LocalResult,
    LocalTrainer,
    TaskControl,
    TrainContext,
)

#: Refuses as little as possible: the policy under test is that of another client.
_LENIENT = Policy(secure_aggregation=SecureAggregationPolicy(min_cohort=2))


class Idle:
    """A trainer with one example that returns the model unchanged."""

    honors: Collection[str] = settings_names() | {EXTRA}
    num_examples = 1

    def train(self, tensors: Mapping[str, Tensor], *, context: TrainContext) -> LocalResult:
        """Return the model unchanged."""
        context.control.check()
        return LocalResult(tensors=tensors, num_examples=1, metrics={"loss": 0.0}, state={})

    def evaluate(self, tensors: Mapping[str, Tensor], *, control: TaskControl) -> LocalEvaluation:
        """Return the model's squared norm as its loss."""
        control.check()
        squared = sum(float(each.double().square().sum()) for each in tensors.values())
        return LocalEvaluation(num_examples=1, metrics={"loss": squared})


@contextmanager
def run_stand_in(invitation: Path, *, home: Path, trainer: LocalTrainer) -> Iterator[None]:
    """Run a client on its own thread; the block starts once it is connected.

    Args:
        invitation: The client's invitation file.
        home: The client's folder; its consent is given here.
        trainer: The client's trainer.

    Raises:
        FedlearnError: The client cannot join, or its runtime failed.
    """
    Home(home).set_consent(granted=True)
    options = RuntimeOptions(home=home, trainer="", invitation=invitation, policy=_LENIENT)
    is_connected, running = threading.Event(), list[tuple[Runtime, asyncio.AbstractEventLoop]]()

    def hear(event: AgentEvent) -> None:
        if event.kind is EventKind.CONNECTED:
            is_connected.set()

    async def run() -> bool:
        runtime = Runtime(options, trainer, on_event=hear)
        running.append((runtime, asyncio.get_running_loop()))
        return await runtime.run()

    with ThreadPoolExecutor(1, thread_name_prefix="fedlearn-stand-in") as thread:
        ended = thread.submit(lambda: asyncio.run(run()))
        # A runtime that fails before it connects must not leave this thread waiting.
        ended.add_done_callback(lambda _: is_connected.set())
        is_connected.wait()
        if ended.done():
            ended.result()
            raise DeploymentError(f"the stand-in of {invitation} has stopped; check its log")
        try:
            yield
        finally:
            for runtime, loop in running:
                if not ended.done():
                    # The runtime belongs to the loop of the other thread.
                    loop.call_soon_threadsafe(runtime.stop)
            ended.result()
