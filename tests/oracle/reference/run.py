"""Replay consecutive rounds, given the clients that were asked.

Cohorts are random, and so is the order in which an asynchronous run receives updates; both come
from the record. Everything else follows: which clients report, which model each started from,
its update, its weight and its new state.

A client's state changes only when its update counts in a round that moves the model. An update
that is late, refused, failed, or part of a discarded attempt has no effect.
"""

import functools
import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

import torch
from torch import nn

from tests.oracle.configuration import DEPLOYED, NUM_CLIENTS, NUM_ROUNDS, SESSIONS, Configuration
from tests.oracle.observation import Round, Run
from tests.oracle.reference import client, server
from tests.oracle.reference.client import Batch, Contribution, Memory, Task
from tests.oracle.reference.measures import evaluate, is_due
from tests.oracle.reference.model import Model, Tensors, norm
from tests.oracle.reference.policies import LEAST_SUMMED, POLICIES
from tests.oracle.reference.privacy import CENTRAL, RecordedNoise
from tests.oracle.workloads import (
    Examples,
    duration_s,
    fails,
    make_examples,
    make_model,
    read,
    take,
)

#: A client's contribution; ``None`` if it cannot train.
Contribute = Callable[[int], Contribution | None]

MAX_EXAMPLES = 8
REPORTED, LATE, FAILED = "reported", "late", "failed"


@dataclass(frozen=True)
class Streams:
    """The recorded random numbers of a run.

    Attributes:
        order: Maps (round of the model, client, epoch, examples) to the order of the examples.
        key: Maps (round of the model, client, step) to the key of a batch's augmentation.
    """

    order: Callable[[int, int, int, int], Sequence[int]]
    key: Callable[[int, int, int], int]


@dataclass(frozen=True)
class Expected:
    """The expected result of a round.

    Attributes:
        statuses: By client; ``None`` where only the record knows the order of arrivals.
        losses: Training loss of each client that reported.
        metrics: Maps the evaluated clients to the recorded metrics; ``None``: none are due.
        of_round: The round's own metrics, which do not depend on an evaluation.
    """

    statuses: dict[int, str] | None
    tensors: Tensors
    kept: dict[int, Memory]
    train_loss: float
    losses: dict[int, float]
    staleness: dict[int, int]
    metrics: Callable[[Sequence[int]], dict[str, float]] | None
    of_round: dict[str, float]


class Replay:
    """Replays a run from its record.

    Args:
        c: The configuration.
        module: Its model; the weights do not matter.
        examples: The examples of all clients.
        run: Its record has the cohorts, the initial model and the noise.
        streams: Its random numbers.
    """

    def __init__(
        self, c: Configuration, module: nn.Module, examples: Examples, run: Run, streams: Streams
    ) -> None:
        self.c, self.examples, self._run, self._streams = c, examples, run, streams
        self.model, self.noise = Model(module, c.objective), RecordedNoise(run.noise)
        floats = {name: value for name, value in run.initial.items() if value.is_floating_point()}
        x = {name: value.double() for name, value in floats.items()}
        #: Before each round: the model, and the server's state, which may be broadcast.
        self.history = [(x, server.begin(c, self.model, x))]
        self.kept = dict[int, Memory]()

    def rounds(self) -> Iterator[Expected]:
        """Yield the expected result of each round."""
        for round_num, seen in enumerate(self._run.rounds):
            x, state = self.history[-1]
            broadcast = state
            sent, staleness = dict[int, Contribution](), dict[int, int]()
            for row in seen.rows:
                if row.status == REPORTED:
                    bases = self._bases(seen, row.client_id, round_num)
                    made = [(self.contribute(row.client_id, base), base) for base in bases]
                    sound = [(each, base) for each, base in made if each is not None]
                    if sound:
                        best, base = min(sound, key=lambda pair: abs(pair[0].loss - row.loss))
                        sent[row.client_id], staleness[row.client_id] = best, round_num - base
            if seen.is_aggregated:
                counted = [
                    server.Counted(
                        contribution=made,
                        x_0=self.history[round_num - staleness[each]][0],
                        staleness=staleness[each],
                    )
                    for each, made in sent.items()
                ]
                at = round_num, seen.attempt
                x, state = server.step(
                    self.c, self.model, x, state, counted, noise=self.noise, at=at
                )
            asked = [row.client_id for row in seen.rows]
            statuses = self._statuses(asked, round_num, seen.attempt)
            if seen.is_aggregated:
                self.kept |= {each: made.kept for each, made in sent.items() if made.kept}
            self.history.append((x, state))
            yield Expected(
                statuses=statuses,
                tensors=x,
                kept=dict(self.kept),
                train_loss=mean_loss(self.c, list(sent.values())),
                losses={
                    each: math.nan if hides_losses(self.c) else made.loss
                    for each, made in sent.items()
                },
                staleness=histogram(list(staleness.values())),
                metrics=self._metrics(x, round_num + 1),
                of_round=self._of_round(
                    list(sent.values()), is_aggregated=seen.is_aggregated, broadcast=broadcast
                ),
            )

    @staticmethod
    def _bases(seen: Round, client_id: int, round_num: int) -> list[int]:
        """Return the rounds whose models a client's update may be based on.

        A client that was in flight as the round began may have failed in one of its attempts and
        been asked again with the newest model. The record does not tell, but the loss does.
        """
        if client_id not in seen.in_flight:
            return [round_num]
        in_flight = seen.in_flight[client_id]
        return [in_flight, round_num] if seen.attempt else [in_flight]

    def contribute(self, client_id: int, based_on: int) -> Contribution | None:
        """Return the contribution of a client that trained on the model of round ``based_on``."""
        x_0, broadcast = self.history[based_on]
        task = Task(
            c=self.c,
            client_id=client_id,
            model=self.model,
            x_0=x_0,
            broadcast=broadcast,
            round_num=based_on,
            kept=self.kept.get(client_id, {}),
            num_examples=num_used(self.c, len(self.examples.of(client_id)[1])),
            noise=self.noise,
        )
        try:
            return client.train(task, self._batches(client_id, based_on))
        except ValueError:  # BatchNorm cannot normalize a single example
            return None

    def _batches(self, client_id: int, round_num: int) -> Iterator[Batch]:
        """Yield a client's batches in a round; the last one of an epoch may be smaller."""
        c, (features, labels) = self.c, self.examples.of(client_id)
        num = len(labels)
        epochs, size, shuffle = c.epochs, c.batch_size or num, c.shuffle
        if c.own == "trainer":
            epochs, size, shuffle = 1, num, False
        if c.own == "locals" and client_id % 2 == 0:
            epochs = 1
        steps = itertools.count()
        for epoch in range(epochs):
            visited: Sequence[int] = range(num)
            if shuffle:
                visited = self._streams.order(round_num, client_id, epoch, num)
            for start in range(0, num_used(c, num), size):
                rows = torch.tensor(list(visited[start : start + size]))
                key = self._streams.key(round_num, client_id, next(steps))
                yield read(c, take(features, rows), key), labels[rows]

    def _statuses(self, asked: list[int], round_num: int, attempt: int) -> dict[int, str] | None:
        is_buffer = self.c.algorithm in ("fedbuff", "fedasync")
        is_by_chance = self.c.place in DEPLOYED and self.c.stragglers == "oversample"
        if self.c.rounds != "synchronous" or is_buffer or is_by_chance:
            return None
        return close(
            self.c, asked, round_num, attempt, lambda each: self.contribute(each, round_num)
        )

    def _of_round(
        self, sent: list[Contribution], *, is_aggregated: bool, broadcast: Memory
    ) -> dict[str, float]:
        """Return the adaptive clip norm, and how many updates a secure sum or clip scaled down."""
        if not is_aggregated:
            return {}
        found = {name: float(value[""]) for name, value in broadcast.items() if name == "clip_norm"}
        is_clipped_last = self.c.update_clip > 0 and self.c.own != "transform"
        is_known = is_clipped_last if self.c.secure == "off" else self.c.place not in DEPLOYED
        if is_known and self.c.privacy == "off":
            found["num_clipped"] = float(sum(each.is_scaled_down for each in sent))
        return found

    def _metrics(
        self, x: Tensors, num_finished: int
    ) -> Callable[[Sequence[int]], dict[str, float]] | None:
        if not is_due(self.c, num_finished, NUM_ROUNDS):
            return None
        return lambda clients: evaluate(self.c, self.model, x, self.examples, clients)


def close(
    c: Configuration, asked: Sequence[int], round_num: int, attempt: int, contribute: Contribute
) -> dict[int, str]:
    """Return the status of each client that a synchronous round asked.

    The round closes with the last report that it wants, or at the deadline. A client that has not
    answered by then is late, even if it would have failed.
    """
    policy, statuses, num_reports = POLICIES[c.stragglers], dict[int, str](), 0
    # Under central privacy a round waits for all clients, so that fast ones displace no others.
    num_wanted = math.inf if c.privacy in CENTRAL else policy.num_wanted
    for each in sorted(asked, key=lambda one: duration_s(c, one, round_num, attempt)):
        is_closed = num_reports == num_wanted
        if is_closed or duration_s(c, each, round_num, attempt) > policy.deadline_s:
            statuses[each] = LATE
        elif fails(c, each, round_num, attempt) or is_refused(c, contribute(each)):
            statuses[each] = FAILED
        else:
            statuses[each], num_reports = REPORTED, num_reports + 1
    if c.secure != "off" and num_reports < max(policy.min_reports, LEAST_SUMMED):
        # No sum is opened, so these clients' updates stay unknown.
        statuses = {each: FAILED if own == REPORTED else own for each, own in statuses.items()}
    return statuses


def num_used(c: Configuration, num_examples: int) -> int:
    """Return on how many examples a client trains in an epoch, which is also its weight."""
    full = num_examples // c.batch_size * c.batch_size if c.drop_last else 0
    return full or num_examples


def is_refused(c: Configuration, sent: Contribution | None) -> bool:
    """Return whether a client could not train, or its update exceeds a bound."""
    if sent is None:
        return True
    if c.bound == "norm":
        return longest(sent) > max_norm(c)
    return c.bound == "examples" and sent.num_examples > MAX_EXAMPLES


def longest(sent: Contribution) -> float:
    """Return the largest norm in an update; the bound applies to each vector separately."""
    return max(sent.trained_norm, *(norm(each) for each in sent.lanes.values()), 0.0)


@functools.cache
def max_norm(c: Configuration) -> float:
    """Return a bound near the longest update of the first round, so that some updates exceed it."""
    plain = replace(c, bound="none", privacy="off", secure="off")
    in_order = Streams(order=lambda _round, _client, _epoch, num: range(num), key=lambda *_: 0)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        module = make_model(c)
    tensors = itertools.chain(module.named_parameters(), module.named_buffers())
    initial = Run(initial={name: value.detach().clone() for name, value in tensors})
    examples = make_examples(c)
    replay = Replay(plain, module, examples, initial, in_order)
    some = [each for each in range(NUM_CLIENTS) if len(examples.of(each)[1])]
    made = (replay.contribute(each, 0) for each in some)
    second, longest_of_all = sorted(longest(each) for each in made if each is not None)[-2:]
    # EASGD's clients first send zeros.
    return math.sqrt(second * longest_of_all) * 1.15 or 0.1


def hides_losses(c: Configuration) -> bool:
    """Return whether clients do not report their training losses, to which no noise is added."""
    is_secret = c.privacy in ("local", "example") and c.place in SESSIONS
    return is_secret or c.privacy == "distributed"


def mean_loss(c: Configuration, sent: Sequence[Contribution]) -> float:
    """Return a round's training loss: averaged over examples, or clients in an unweighted sum."""
    if not sent or hides_losses(c):
        return math.nan
    n = [each.num_examples for each in sent]
    w = [server.weight(c, each) if c.secure != "off" else float(each) for each in n]
    return sum(a * each.loss for a, each in zip(w, sent, strict=True)) / sum(w)


def histogram(staleness: Sequence[int]) -> dict[int, int]:
    """Return the number of updates for each staleness."""
    return {each: staleness.count(each) for each in sorted(set(staleness))}
