"""Configurations that try every pair of values: a covering array of strength 2, by a greedy search.

Cohen et al., 1997, `The AETG System <https://doi.org/10.1109/32.605761>`_: take a pair of values
that no configuration has yet, complete it at random several times, keep the completion that covers
most new pairs. A refusal would hide every other pair in a configuration, so completions are refused
by no rule; a pair that is refused whatever stands beside it is a configuration of its own.
"""

import itertools
from collections.abc import Iterable, Iterator, Mapping, Sequence

import numpy as np

from tests.oracle.configuration import DEPLOYED, OPTIONS, SESSIONS, Configuration, Value
from tests.oracle.reference.refusals import is_asynchronous, reasons

#: Options that change the shapes of what is compiled.
SHAPES = (
    *("model", "norm", "frozen", "tied", "unused", "dtype", "objective"),
    *("batch_size", "workers", "block_size"),
)
#: Completions of a pair that are tried.
NUM_TRIED = 10
#: Of so many random configurations one is left as it is drawn: it is refused, as nearly all are.
LEFT_AS_DRAWN = 10

Pair = tuple[tuple[str, Value], tuple[str, Value]]
Options = Mapping[str, Sequence[Value]]


def walk(seed: int) -> Iterator[Configuration]:
    """Yield configurations without end: those that cover all pairs first, then random ones."""
    yield from build_covering(seed)
    for number in range(10**9):
        rng = np.random.default_rng([seed, 1, number])
        is_left = number % LEFT_AS_DRAWN == 0
        yield settle(_draw(rng, OPTIONS)) if is_left else _complete(rng, {}, OPTIONS)


def build_covering(seed: int, options: Options = OPTIONS) -> Iterator[Configuration]:
    """Yield configurations until every pair of values that can be said is in one of them."""
    rng = np.random.default_rng([seed, 0])
    never = [value for value in _values(options) if reasons(settle(_with(value)))]
    yield from (settle(_with(value)) for value in never)
    pairs = [pair for pair in _all_pairs(rng, options) if not set(pair) & set(never)]
    missing = dict.fromkeys(pairs)
    while missing:
        wanted = next(iter(missing))
        alone = settle(_with(*wanted))
        if not _has(alone, wanted) or reasons(alone):
            del missing[wanted]  # it says nothing, or is refused whatever stands beside it
            if _has(alone, wanted):
                yield alone
            continue
        tried = [_complete(rng, dict(wanted), options) for _ in range(NUM_TRIED)]
        gains = [sum(pair in missing for pair in _pairs(each)) for each in tried]
        best = tried[int(np.argmax(gains))]
        for pair in _pairs(best):
            missing.pop(pair, None)
        yield best


def walk_simplest() -> Iterator[Configuration]:
    """Yield the configurations with one value, then with two, that differ from the default.

    Those that a rule refuses are left out.
    """
    values = [value for value in _values(OPTIONS) if value[1] != OPTIONS[value[0]][0]]
    seen = set[Configuration]()
    for wanted in (*zip(values), *itertools.combinations(values, 2)):
        c = settle(_with(*wanted))
        if c not in seen and _has(c, wanted) and not reasons(c):
            seen.add(c)
            yield c


def _complete(
    rng: np.random.Generator, wanted: Mapping[str, Value], options: Options
) -> Configuration:
    """Return a random configuration with some values, made simpler until no rule refuses it.

    First an option goes back to its default where fewer rules refuse it then, so that much of what
    was drawn stays; if that is not enough, any option does.
    """
    c, simplest = settle(_draw(rng, options).with_values(wanted)), Configuration()
    names = [name for name in rng.permutation(list(options)).tolist() if name not in wanted]
    num_reasons = len(reasons(c))
    for is_last_resort in (False, True):
        for name in names:
            if not num_reasons and _has(c, wanted.items()):
                return c
            if getattr(c, name) == getattr(simplest, name):
                continue
            simpler = settle(c.with_values({name: getattr(simplest, name)} | dict(wanted)))
            num_left = len(reasons(simpler))
            if is_last_resort or num_left < num_reasons:
                c, num_reasons = simpler, num_left
    return c


def settle(c: Configuration) -> Configuration:
    """Return a configuration with every option that would say nothing in it at its default.

    FedSGD has no other optimizer than its one step, for instance, and a client's session has no
    block size.
    """
    settled = dict[str, Value]()
    for when, options in _settle(c):
        if when:
            settled |= options
    return c.with_values(settled)


def _settle(c: Configuration) -> Iterator[tuple[bool, dict[str, Value]]]:
    # Compiling takes seconds for each shape; what is compiled is the gradient of a step.
    yield c.place == "compiled", {name: getattr(Configuration(), name) for name in SHAPES}
    plain: dict[str, Value] = {"optimizer": "sgd", "weight_decay": 0.0}
    alone: dict[str, Value] = {"gradient_clip": 0.0, "schedule": "none"}
    all_at_once: dict[str, Value] = {"epochs": 1, "batch_size": 0, "shuffle": False}
    usual: dict[str, Value] = {"epochs": 2, "batch_size": 4, "shuffle": True}
    has_strategy = c.algorithm in ("scaffold", "easgd")
    is_buffer = c.algorithm in ("fedbuff", "fedasync")
    own = c.own
    if own == "strategy":
        yield True, {"algorithm": "fedavg", "bound": "none"}  # a number of steps has a norm, too
    if own in ("aggregation", "weigh") and (has_strategy or c.algorithm == "median"):
        own = "none"
    if own == "transform" and has_strategy:
        own = "none"
    if own in ("update", "trainer", "locals") and c.algorithm == "fedsgd":
        own = "none"
    yield True, {"own": own}
    is_fedsgd = c.algorithm == "fedsgd" and own != "strategy"
    yield is_fedsgd, {**plain, **alone, **all_at_once}
    yield own in ("update", "strategy"), plain
    yield own == "trainer", {**plain, **usual}
    # Over sessions it is clients who refuse what their trainer does not honour, in round 1.
    refuses = own == "trainer" and c.place in SESSIONS
    yield refuses, alone
    yield refuses and c.algorithm == "fedprox", {"algorithm": "fedavg"}
    yield c.batch_size == 0 or is_fedsgd or own == "trainer", {"drop_last": False}
    # Gradients of examples are another step to compile.
    yield c.place == "compiled" and c.privacy == "example", {"privacy": "off"}
    yield c.privacy != "off", {"by_examples": False}
    counts_alike = c.algorithm in ("scaffold", "easgd", "median", "fedasync")
    has_own_weights = own in ("weigh", "strategy")
    yield own == "aggregation" or (counts_alike and not has_own_weights), {"by_examples": True}
    yield has_strategy, {"update_clip": 0.0}
    yield c.place in SESSIONS, {"workers": 1, "block_size": 3}
    yield c.place not in SESSIONS, {"slab": False}
    # Their clients find that out themselves, in round 1.
    is_deployed = c.place in DEPLOYED
    yield (
        is_deployed and c.model == "sequence" and c.objective == "binary",
        {"objective": "cross_entropy"},
    )
    # The devices are real ones, and a deployment commits each round before it goes on.
    yield is_deployed, {"devices": "ideal", "checkpoints": "every_round"}
    # A trainer of one's own has its own examples there, and reads them as it likes.
    yield is_deployed and own == "trainer", {"augmented": False}
    # In real time, a deadline of less than a second would be a matter of chance.
    yield c.place == "grpc" and c.stragglers != "oversample", {"stragglers": "wait"}
    yield c.place == "grpc", {"interrupted": "no"}  # its gateway would have to be another process
    # A simulation keeps no journal of attempts, as a deployment does. It would ask nodes for a sum
    # of the same attempt again, and a node releases one.
    yield c.place == "flower" and c.secure == "protocol", {"interrupted": "no"}
    yield is_buffer and own != "strategy", {"rounds": "synchronous"}
    is_buffered = c.rounds == "buffered" or (is_buffer and own != "strategy")
    yield is_buffered, {"stragglers": "wait"}
    yield is_buffered or c.rounds == "late", {"checkpoints": "every_round"}
    # Which model a late client started from, after attempts that were thrown away, its loss tells;
    # clients that add noise themselves do not tell it.
    hides_losses = c.place in SESSIONS and c.privacy in ("local", "example")
    yield hides_losses and is_asynchronous(c) and c.stragglers != "wait", {"stragglers": "skip"}
    yield c.sizes == "empty" or c.augmented, {"source": "dataset"}
    yield c.secure == "protocol" and c.place not in SESSIONS, {"place": "memory"}
    is_distributed = c.privacy == "distributed" and c.secure == "off"
    yield is_distributed, {"secure": "protocol" if c.place in SESSIONS else "modular_sum"}


def _has(c: Configuration, values: Iterable[tuple[str, Value]]) -> bool:
    return all(getattr(c, name) == value for name, value in values)


def _values(options: Options) -> Iterator[tuple[str, Value]]:
    for name, values in options.items():
        yield from ((name, value) for value in values)


def _with(*values: tuple[str, Value]) -> Configuration:
    return Configuration().with_values(dict(values))


def _all_pairs(rng: np.random.Generator, options: Options) -> list[Pair]:
    names = list(options)
    found = [
        ((first, a), (second, b))
        for place, first in enumerate(names)
        for second in names[place + 1 :]
        for a in options[first]
        for b in options[second]
    ]
    return [found[each] for each in rng.permutation(len(found))]


def _pairs(c: Configuration) -> Iterator[Pair]:
    values = [(name, getattr(c, name)) for name in OPTIONS]
    for place, first in enumerate(values):
        for second in values[place + 1 :]:
            yield first, second


def _draw(rng: np.random.Generator, options: Options) -> Configuration:
    drawn = {name: values[int(rng.integers(len(values)))] for name, values in options.items()}
    return Configuration().with_values(drawn)
