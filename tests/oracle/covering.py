"""Configurations that try every pair of values: a covering array of strength 2, by a greedy search.

Cohen et al., 1997, `The AETG System <https://doi.org/10.1109/32.605761>`_: take a pair of values
that no configuration has yet, complete it at random several times, keep the completion that covers
most new pairs. Configurations that must run come first: a refusal hides every other pair in it. A
refused configuration covers only the pair that it was made for, and only if every completion that
was tried is refused.
"""

from collections.abc import Iterator

import numpy as np

from tests.oracle.configuration import OPTIONS, Configuration, Value
from tests.oracle.reference.refusals import reasons

#: Completions of a pair that are tried.
NUM_TRIED = 12

Pair = tuple[tuple[str, Value], tuple[str, Value]]


def walk(seed: int) -> Iterator[Configuration]:
    """Yield configurations without end: those that cover all pairs first, then random ones."""
    yield from covering(seed)
    for number in range(10**9):
        yield settle(_drawn(np.random.default_rng([seed, 1, number])))


def covering(seed: int) -> Iterator[Configuration]:
    """Yield configurations until every pair of values that can be said is in one of them."""
    rng = np.random.default_rng([seed, 0])
    missing = dict.fromkeys(_all_pairs(rng))
    while missing:
        wanted = next(iter(missing))
        best, best_gain = None, -1
        refused = None
        for _ in range(NUM_TRIED):
            tried = settle(_with(_drawn(rng), wanted))
            if wanted not in _pairs(tried):
                continue
            if reasons(tried):
                refused = refused or tried
                continue
            gain = sum(pair in missing for pair in _pairs(tried))
            if gain > best_gain:
                best, best_gain = tried, gain
        if best is not None:
            for pair in _pairs(best):
                missing.pop(pair, None)
            yield best
        else:
            del missing[wanted]  # no configuration says it, or all that do are refused
            if refused is not None:
                yield refused


def settle(c: Configuration) -> Configuration:
    """Return a configuration with every option that would say nothing in it at its default.

    FedSGD has no other optimizer than its one step, for instance, and a client's session has no
    block size.
    """
    for when, options in _settled(c):
        if when:
            for option, value in options.items():
                c = c.with_value(option, value)
    return c


def _settled(c: Configuration) -> Iterator[tuple[bool, dict[str, Value]]]:
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
    yield (
        own == "aggregation" or c.algorithm in ("scaffold", "easgd", "median", "fedasync"),
        {"by_examples": True},
    )
    yield has_strategy, {"update_clip": 0.0}
    yield c.place == "memory", {"workers": 1, "block_size": 3}
    yield c.place != "memory", {"slab": False}
    yield is_buffer and own != "strategy", {"rounds": "synchronous"}
    is_buffered = c.rounds == "buffered" or (is_buffer and own != "strategy")
    yield is_buffered, {"stragglers": "wait"}
    yield is_buffered or c.rounds == "late", {"checkpoints": "every_round"}
    yield c.sizes == "empty", {"source": "dataset"}


def _all_pairs(rng: np.random.Generator) -> list[Pair]:
    names = list(OPTIONS)
    found = [
        ((first, a), (second, b))
        for place, first in enumerate(names)
        for second in names[place + 1 :]
        for a in OPTIONS[first]
        for b in OPTIONS[second]
    ]
    return [found[each] for each in rng.permutation(len(found))]


def _pairs(c: Configuration) -> Iterator[Pair]:
    values = [(name, getattr(c, name)) for name in OPTIONS]
    for place, first in enumerate(values):
        for second in values[place + 1 :]:
            yield first, second


def _drawn(rng: np.random.Generator) -> Configuration:
    c = Configuration()
    for name, values in OPTIONS.items():
        c = c.with_value(name, values[int(rng.integers(len(values)))])
    return c


def _with(c: Configuration, pair: Pair) -> Configuration:
    for option, value in pair:
        c = c.with_value(option, value)
    return c
