"""What must not start, and why: from the documentation, never from what the product says.

A rule is a condition on a configuration, and words that a true reason contains.
"""

from collections.abc import Callable
from typing import NamedTuple

from tests.oracle.configuration import Configuration


class Rule(NamedTuple):
    """Why some configurations must be refused before their first round.

    Attributes:
        says: Words that the reason must contain.
        source: The page that says so.
        holds: Whether a configuration is one of them.
    """

    says: str
    source: str
    holds: Callable[[Configuration], bool]


def is_plain_chain(c: Configuration) -> bool:
    """Return whether the model is what the fused executor takes: linear layers and convolutions."""
    is_chain = c.model in ("mlp", "linear", "conv") and not c.unused
    return is_chain and c.norm == "none" and c.tied == "none" and c.frozen == "none"


def is_asynchronous(c: Configuration) -> bool:
    """Return whether clients may start from models of several rounds."""
    return c.rounds != "synchronous" or c.algorithm in ("fedbuff", "fedasync")


def is_plain_sgd(c: Configuration) -> bool:
    """Return whether a client steps by the learning rate times the gradient, and nothing else."""
    return c.optimizer == "sgd" and not c.weight_decay and is_sgd_at_constant_rate(c)


def is_sgd_at_constant_rate(c: Configuration) -> bool:
    """Return whether a client takes steps of SGD, with momentum and decay or not."""
    is_sgd = c.optimizer in ("sgd", "momentum", "momentum_kept")
    is_ours = c.own not in ("update", "strategy", "trainer")
    return is_sgd and is_ours and not c.gradient_clip and c.schedule == "none"


RULES: tuple[Rule, ...] = (
    Rule("no examples", "how-to/own-data.md: an empty client", lambda c: c.sizes == "empty"),
    Rule(
        "SCAFFOLD's clients take plain SGD steps",
        "reference/python.md: Scaffold, sgd",
        lambda c: c.algorithm == "scaffold" and not is_plain_sgd(c),
    ),
    Rule(
        "EASGD's clients take SGD steps at a constant rate",
        "reference/python.md: EASGD, sgd",
        lambda c: c.algorithm == "easgd" and not is_sgd_at_constant_rate(c),
    ),
    Rule(
        "cannot be asynchronous",
        "explanation/asynchronous.md: what goes with it",
        lambda c: c.algorithm in ("scaffold", "easgd") and is_asynchronous(c),
    ),
    Rule(
        'engine.executor "fused"',
        "how-to/executors.md: chains of layers that all train, with cross-entropy",
        lambda c: c.place == "fused" and (not is_plain_chain(c) or c.objective != "cross_entropy"),
    ),
    Rule(
        "trainers of their own, which train one at a time",
        "how-to/executors.md: a trainer of your own is no executor's to stack",
        lambda c: (
            c.own == "trainer"
            and (c.place in ("vmap", "fused") or (c.place != "memory" and c.block_size > 1))
        ),
    ),
    Rule(
        "one output and one label an example",
        "reference/python.md: BinaryCrossEntropy",
        lambda c: c.objective == "binary" and c.model == "sequence",
    ),
    Rule(
        "does not honour",
        "how-to/own-algorithm.md: a trainer",
        lambda c: (
            c.own == "trainer"
            and (c.algorithm == "fedprox" or c.gradient_clip > 0 or c.schedule != "none")
        ),
    ),
    # What secure aggregation does not go with: how-to/aggregate-securely.md and
    # explanation/secure-aggregation.md.
    Rule(
        "engine.transport",
        "how-to/aggregate-securely.md: the protocol runs over memory, its sum in the engine",
        lambda c: (
            (c.secure == "protocol" and c.place != "memory")
            or (c.secure == "modular_sum" and c.place == "memory")
        ),
    ),
    Rule(
        "must see each update",
        "how-to/own-algorithm.md: the coordinator sees each update",
        lambda c: c.secure != "off" and (c.algorithm == "median" or c.own == "aggregation"),
    ),
    Rule(
        "its own methods would not be called",
        "how-to/aggregate-securely.md: clients weigh by examples or alike",
        lambda c: c.secure != "off" and c.own == "weigh",
    ),
    Rule(
        "has no bound",
        "explanation/secure-aggregation.md: sums of numbers of a known size",
        lambda c: c.secure != "off" and (c.own == "strategy" or c.algorithm == "scaffold"),
    ),
    Rule(
        "its terms name one training for all",
        "explanation/secure-aggregation.md: the signed terms of a session",
        lambda c: c.secure != "off" and c.own == "locals",
    ),
    Rule(
        "which clips",
        "explanation/aggregation.md: bounds mean nothing where no update is seen",
        lambda c: c.secure != "off" and c.bound != "none",
    ),
    Rule(
        "sampler= may ask any number",
        "how-to/own-sampler-and-callbacks.md: secure aggregation rests on how many are asked",
        lambda c: c.secure != "off" and c.sampling == "own",
    ),
    Rule(
        "masks cancel in the sum of one session",
        "explanation/asynchronous.md: what goes with it",
        lambda c: c.secure != "off" and is_asynchronous(c),
    ),
    Rule(
        "secure aggregation releases no sum of fewer than",
        "explanation/secure-aggregation.md: below the minimum nothing is released",
        lambda c: c.secure != "off" and c.stragglers in ("some", "oversample"),
    ),
)


def reasons(c: Configuration) -> list[str]:
    """Return what the refusal of a configuration may say; nothing if it must run."""
    return [rule.says for rule in RULES if rule.holds(c)]
