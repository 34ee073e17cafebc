"""Configurations that try every pair of values: a greedy covering array of strength 2.

Cohen et al., 1997, `The AETG System <https://doi.org/10.1109/32.605761>`_: take an uncovered pair
of values, complete it at random several times, and keep the completion that covers most new
pairs. A refused configuration would hide all of its other pairs, so completions avoid every
refusal. A pair that is refused together with any other values gets its own configuration.
"""

import itertools
from collections.abc import Iterable, Iterator, Mapping, Sequence

import numpy as np

from tests.oracle.configuration import DEPLOYED, OPTIONS, SESSIONS, Configuration, Value
from tests.oracle.reference.refusals import is_asynchronous, reasons

#: Options that change the shapes of compiled code.
SHAPES = (
    *("model", "norm", "frozen", "tied", "unused", "dtype", "objective"),
    *("batch_size", "workers", "block_size"),
)
#: Completions to try for each pair.
NUM_TRIED = 10
#: One in so many random configurations stays as drawn: it is refused, as nearly all are.
LEFT_AS_DRAWN = 10

Pair = tuple[tuple[str, Value], tuple[str, Value]]
Options = Mapping[str, Sequence[Value]]


def walk(seed: int) -> Iterator[Configuration]:
    """Yield configurations without end: first those that cover all pairs, then random ones."""
    yield from build_covering(seed)
    for number in range(10**9):
        rng = np.random.default_rng([seed, 1, number])
        is_left = number % LEFT_AS_DRAWN == 0
        yield settle(_draw(rng, OPTIONS)) if is_left else _complete(rng, {}, OPTIONS)


def build_covering(seed: int, options: Options = OPTIONS) -> Iterator[Configuration]:
    """Yield configurations until they contain every pair of values that can have an effect."""
    rng = np.random.default_rng([seed, 0])
    never = [value for value in _values(options) if reasons(settle(_with(value)))]
    yield from (settle(_with(value)) for value in never)
    pairs = [pair for pair in _all_pairs(rng, options) if not set(pair) & set(never)]
    missing = dict.fromkeys(pairs)
    while missing:
        wanted = next(iter(missing))
        alone = settle(_with(*wanted))
        if not _has(alone, wanted) or reasons(alone):
            del missing[wanted]  # it has no effect, or is refused with any other values
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
    """Yield the accepted configurations with one value, then two, that differ from the default."""
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
    """Return a random configuration with the wanted values, simplified until no rule refuses it.

    First an option returns to its default only if fewer rules refuse the result, so that much of
    the draw remains; if that does not suffice, any option does.
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
    """Set every option that has no effect in a configuration to its default.

    For instance, FedSGD has no optimizer besides its one step, and a client's session has no
    block size.
    """
    settled = dict[str, Value]()
    for when, options in _settle(c):
        if when:
            settled |= options
    return c.with_values(settled)


def _settle(c: Configuration) -> Iterator[tuple[bool, dict[str, Value]]]:
    # Compiling takes seconds for each shape; the gradient of a step is what is compiled.
    yield c.place == "compiled", {name: getattr(Configuration(), name) for name in SHAPES}
    plain: dict[str, Value] = {"optimizer": "sgd", "weight_decay": 0.0}
    alone: dict[str, Value] = {"gradient_clip": 0.0, "schedule": "none"}
    all_at_once: dict[str, Value] = {"epochs": 1, "batch_size": 0, "shuffle": False}
    usual: dict[str, Value] = {"epochs": 2, "batch_size": 4, "shuffle": True}
    has_strategy = c.algorithm in ("scaffold", "easgd")
    is_buffer = c.algorithm in ("fedbuff", "fedasync")
    own = c.own
    if own == "strategy":
        yield True, {"algorithm": "fedavg", "bound": "none"}  # a number of steps also has a norm
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
    # Over sessions the clients refuse, in round 1, what their trainer does not honor.
    refuses = own == "trainer" and c.place in SESSIONS
    yield refuses, alone
    yield refuses and c.algorithm == "fedprox", {"algorithm": "fedavg"}
    yield c.batch_size == 0 or is_fedsgd or own == "trainer", {"drop_last": False}
    # Per-example gradients would be another step to compile.
    yield c.place == "compiled" and c.privacy == "example", {"privacy": "off"}
    yield c.privacy != "off", {"by_examples": False}
    counts_alike = c.algorithm in ("scaffold", "easgd", "median", "fedasync")
    has_own_weights = own in ("weigh", "strategy")
    yield own == "aggregation" or (counts_alike and not has_own_weights), {"by_examples": True}
    yield has_strategy, {"update_clip": 0.0}
    yield c.place in SESSIONS, {"workers": 1, "block_size": 3}
    yield c.place not in SESSIONS, {"slab": False}
    # Deployed clients notice that themselves, in round 1.
    is_deployed = c.place in DEPLOYED
    yield (
        is_deployed and c.model == "sequence" and c.objective == "binary",
        {"objective": "cross_entropy"},
    )
    # Devices are real there, and a deployment commits each round before the next starts.
    yield is_deployed, {"devices": "ideal", "checkpoints": "every_round"}
    # A user's trainer has its own examples there, and reads them as it likes.
    yield is_deployed and own == "trainer", {"augmented": False}
    # In real time the outcome of a deadline below a second would be random.
    yield c.place == "grpc" and c.stragglers != "oversample", {"stragglers": "wait"}
    yield c.place == "grpc", {"interrupted": "no"}  # its gateway would need another process
    # Unlike a deployment, a simulation keeps no journal of attempts. It would ask nodes for a sum
    # of the same attempt a second time, and a node releases only one.
    yield c.place == "flower" and c.secure == "protocol", {"interrupted": "no"}
    yield is_buffer and own != "strategy", {"rounds": "synchronous"}
    is_buffered = c.rounds == "buffered" or (is_buffer and own != "strategy")
    yield is_buffered, {"stragglers": "wait"}
    yield is_buffered or c.rounds == "late", {"checkpoints": "every_round"}
    # After discarded attempts only its loss reveals which model a late client started from, and
    # clients that add noise themselves do not report it.
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
