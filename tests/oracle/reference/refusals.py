"""Which configurations must be refused, and why: by the documentation, never by the product.

A rule is a condition on a configuration, and words that every valid reason contains.
"""

from collections.abc import Callable
from typing import NamedTuple

from tests.oracle.configuration import SESSIONS, Configuration
from tests.oracle.reference.privacy import CENTRAL

#: Pages that the rules come from.
PRIVACY = "explanation/privacy-limits.md"
EXAMPLES = "explanation/example-privacy.md"
SECURE = "explanation/secure-aggregation.md"
SECURELY = "how-to/aggregate-securely.md"
ASYNCHRONOUS = "explanation/asynchronous.md"
EXECUTORS = "how-to/executors.md"
PYTHON = "reference/python.md"
OWN_ALGORITHM = "how-to/own-algorithm.md"


class Rule(NamedTuple):
    """Why some configurations must be refused before their first round.

    Attributes:
        says: Words that the reason must contain.
        source: The page that states the rule.
        holds: Whether the rule refuses a configuration.
    """

    says: str
    source: str
    holds: Callable[[Configuration], bool]


def is_plain_chain(c: Configuration) -> bool:
    """Return whether the fused executor accepts the model: linear layers and convolutions only."""
    is_chain = c.model in ("mlp", "linear", "conv") and not c.unused
    return is_chain and c.norm == "none" and c.tied == "none" and c.frozen == "none"


def is_asynchronous(c: Configuration) -> bool:
    """Return whether clients may start from models of several rounds."""
    return c.rounds != "synchronous" or c.algorithm in ("fedbuff", "fedasync")


def is_sgd_at_constant_rate(c: Configuration) -> bool:
    """Return whether a client uses SGD at a constant rate, with or without momentum and decay."""
    is_sgd = c.optimizer in ("sgd", "momentum", "momentum_kept")
    is_ours = c.own not in ("update", "strategy", "trainer")
    return is_sgd and is_ours and not c.gradient_clip and c.schedule == "none"


def is_summed(c: Configuration) -> bool:
    """Return whether a noisy sum replaces the aggregation."""
    return c.privacy in (*CENTRAL, "distributed")


def sends_more(c: Configuration) -> bool:
    """Return whether clients also send lanes, of unknown size."""
    return c.own == "strategy" or c.algorithm == "scaffold"


def sees_each(c: Configuration) -> bool:
    """Return whether the server must see each update."""
    return c.algorithm == "median" or c.own == "aggregation"


RULES: tuple[Rule, ...] = (
    Rule("no examples", "how-to/own-data.md: an empty client", lambda c: c.sizes == "empty"),
    Rule(
        "SCAFFOLD needs SGD steps at a constant rate",
        f"{PYTHON}: Scaffold, sgd",
        lambda c: (
            c.algorithm == "scaffold"
            and (not is_sgd_at_constant_rate(c) or c.optimizer == "momentum_kept")
        ),
    ),
    Rule(
        "EASGD needs SGD steps at a constant rate",
        f"{PYTHON}: EASGD, sgd",
        lambda c: c.algorithm == "easgd" and not is_sgd_at_constant_rate(c),
    ),
    Rule(
        "cannot be asynchronous",
        f"{ASYNCHRONOUS}: what goes with it",
        lambda c: c.algorithm in ("scaffold", "easgd") and is_asynchronous(c),
    ),
    Rule(
        'engine.executor "fused"',
        f"{EXECUTORS}: chains of layers that all train, with cross-entropy",
        lambda c: (
            c.place == "fused"
            and (not is_plain_chain(c) or c.objective not in ("cross_entropy", "ignored"))
        ),
    ),
    Rule(
        "their own trainers, which train one at a time",
        f"{EXECUTORS}: a trainer of your own is no executor's to stack",
        lambda c: (
            c.own == "trainer"
            and (
                c.place in ("vmap", "fused", "compiled")
                or (c.place not in SESSIONS and c.block_size > 1)
            )
        ),
    ),
    Rule(
        "one output and one label per example",
        f"{PYTHON}: BinaryCrossEntropy",
        lambda c: c.objective == "binary" and c.model == "sequence",
    ),
    Rule(
        "does not honor",
        "how-to/own-trainer.md: `honors`",
        lambda c: (
            c.own == "trainer"
            and (c.algorithm == "fedprox" or c.gradient_clip > 0 or c.schedule != "none")
        ),
    ),
    # Incompatible with secure aggregation: how-to/aggregate-securely.md and
    # explanation/secure-aggregation.md.
    Rule(
        "engine.transport",
        f"{SECURELY}: the protocol runs over memory, its sum in the engine",
        lambda c: (
            (c.secure == "protocol" and c.place not in SESSIONS)
            or (c.secure == "modular_sum" and c.place in SESSIONS)
        ),
    ),
    Rule(
        "must see each update",
        f"{OWN_ALGORITHM}: the coordinator sees each update",
        lambda c: c.secure != "off" and sees_each(c),
    ),
    Rule(
        "its own methods would not be called",
        f"{SECURELY}: secure aggregation weights clients by examples or equally",
        lambda c: c.secure != "off" and c.own == "weigh",
    ),
    Rule(
        "has no bound",
        f"{SECURE}: sums of numbers of a known size",
        lambda c: c.secure != "off" and sends_more(c),
    ),
    Rule(
        "its terms prescribe one training for all",
        f"{SECURE}: the signed terms of a session",
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
        f"{ASYNCHRONOUS}: what goes with it",
        lambda c: c.secure != "off" and is_asynchronous(c),
    ),
    # Incompatible with privacy: how-to/differential-privacy.md and
    # explanation/privacy-limits.md.
    Rule(
        "under secure aggregation clients add the noise",
        "how-to/differential-privacy.md: the modes",
        lambda c: c.secure != "off" and c.privacy in (*CENTRAL, "local", "example"),
    ),
    Rule(
        "running statistics",
        f"{PRIVACY}: noise makes a variance negative",
        lambda c: c.privacy not in ("off", "example") and c.norm == "batch",
    ),
    Rule(
        "computes with all examples of a batch",
        f"{EXAMPLES}: limits",
        lambda c: c.privacy == "example" and c.norm == "batch",
    ),
    Rule(
        "couples the examples of a batch",
        f"{EXAMPLES}: limits",
        lambda c: c.privacy == "example" and c.objective == "coupled",
    ),
    Rule(
        "class_weights",
        "how-to/own-model-and-loss.md: an example's loss is the mean over its own positions",
        lambda c: c.privacy == "example" and c.objective == "weighted",
    ),
    Rule(
        "may use the examples without clip and noise",
        f"{PRIVACY}: fedlearn's own local updates",
        lambda c: c.privacy == "example" and c.own in ("update", "trainer", "strategy"),
    ),
    Rule(
        "each example's gradient is clipped",
        f"{EXECUTORS}: fused has gradients of batches alone",
        lambda c: c.privacy == "example" and c.place == "fused",
    ),
    Rule(
        "moves",
        f"{ASYNCHRONOUS}: what goes with it",
        lambda c: (
            is_asynchronous(c) and (is_summed(c) or (c.privacy == "example" and c.rounds == "late"))
        ),
    ),
    Rule(
        "has no bound",
        f"{PRIVACY}: what one client adds to a sum is bounded",
        lambda c: is_summed(c) and sends_more(c),
    ),
    Rule(
        "has no noise",
        f"{PRIVACY}: all that a client sends has noise",
        lambda c: c.privacy == "local" and sends_more(c),
    ),
    Rule(
        "is not WeightedMean itself",
        f"{PRIVACY}: what one client adds to a sum is bounded",
        lambda c: is_summed(c) and (sees_each(c) or c.own == "weigh"),
    ),
    Rule(
        "which clips",
        f"{PRIVACY}: whether an update counts is accounted for",
        lambda c: c.privacy != "off" and c.bound != "none",
    ),
    Rule(
        "whose ε depends on how clients are drawn",
        "how-to/own-sampler-and-callbacks.md",
        lambda c: c.privacy not in ("off", "banded") and c.sampling == "own",
    ),
    Rule(
        "sampler= chooses the clients",
        "how-to/own-sampler-and-callbacks.md: banded noise has clients take turns",
        lambda c: c.privacy == "banded" and c.sampling == "own",
    ),
    Rule(
        "one user must not displace another",
        f"{PRIVACY}: one client can displace another",
        lambda c: c.privacy in CENTRAL and c.stragglers == "oversample",
    ),
    Rule(
        "secure aggregation releases no sum of fewer than",
        f"{SECURE}: below the minimum nothing is released",
        lambda c: c.secure != "off" and c.stragglers in ("some", "oversample"),
    ),
)


def reasons(c: Configuration) -> list[str]:
    """Return the valid reasons to refuse a configuration; none if it must run."""
    return [rule.says for rule in RULES if rule.holds(c)]
