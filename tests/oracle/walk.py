"""Compare fedlearn with the reference on one configuration after another."""

import itertools
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from tests.oracle import product
from tests.oracle.configuration import NUM_CLIENTS, Configuration
from tests.oracle.covering import settle
from tests.oracle.observation import Refusal, Round, Run
from tests.oracle.reference.privacy import CENTRAL
from tests.oracle.reference.refusals import reasons
from tests.oracle.reference.run import Expected, Replay
from tests.oracle.reference.server import sum_of
from tests.oracle.workloads import make_examples, make_model

#: Largest difference of two numbers, relative to the larger one or to 1.
TOLERANCE = {"float32": 2e-5, "float64": 1e-9}
#: Tolerance for secure aggregation and privacy, which round to a grid.
FIXED_POINT = 5e-5
#: Tolerance for clips and noise with a margin for rounding, of up to one part in 2**13.
MARGIN = 3e-4
#: In float32 a larger difference is not rounding; a smaller one may be, and is retried in float64.
ROUNDING = 1e-3
MAX_PROBLEMS = 5
#: Tolerance for the noise's measured size, in its standard deviations; some draws occur twice.
DEVIATIONS = 6.0
OTHER_CLIENTS = "the clients that are evaluated differ from round to round"


@dataclass(frozen=True)
class Verdict:
    """The result for a configuration: it agrees, is refused for a valid reason, or disagrees."""

    kind: str
    problems: tuple[str, ...] = ()


def judge(c: Configuration, *, may_repeat: bool = True) -> Verdict:
    """Run a configuration on both sides.

    With noise, rounding to a grid may swap two classes that are almost equally likely. So if only
    metrics differ, a second run with other noise decides.
    """
    expected_reasons = reasons(c)
    try:
        found = product.run(c)
    except Exception as error:  # noqa: BLE001 - whatever a run raises is a finding
        return Verdict("disagrees", (f"the run ended by {type(error).__name__}: {error}",))
    if isinstance(found, Refusal):
        if any(each in found.message for each in expected_reasons):
            return Verdict("refused")
        wanted = f"one of {expected_reasons}" if expected_reasons else "a run"
        return Verdict("disagrees", (f"refused: {found.message!r}; expected {wanted}",))
    if expected_reasons:
        return Verdict("disagrees", (f"it ran; expected a refusal, one of {expected_reasons}",))
    problems = tuple(itertools.islice(compare(c, found), MAX_PROBLEMS))
    if may_repeat and c.privacy != "off" and problems and all(map(_is_of_metrics, problems)):
        return judge(c, may_repeat=False)
    if problems and c.dtype == "float32" and not tuple(compare(c, found, tolerance=ROUNDING)):
        exact = judge(replace(c, dtype="float64"))  # distinguishes rounding from a mistake
        return exact if exact.kind == "agrees" else Verdict("disagrees", problems)
    return Verdict("disagrees" if problems else "agrees", problems)


def _is_of_metrics(problem: str) -> bool:
    return ": metrics " in problem or problem == OTHER_CLIENTS


def shrink(c: Configuration) -> Configuration:
    """Return a smaller configuration that disagrees, by resetting options one at a time."""
    simplest = Configuration()
    for option in c.changed():
        tried = settle(c.with_values({option: getattr(simplest, option)}))
        if tried != c and judge(tried).kind == "disagrees":
            c = tried
    return c


def compare(c: Configuration, found: Run, *, tolerance: float | None = None) -> Iterator[str]:
    """Yield the differences between a run and the reference."""
    allowed = TOLERANCE[c.dtype] if tolerance is None else tolerance
    if c.secure != "off" or c.privacy != "off":
        allowed = max(allowed, MARGIN if c.privacy in (*CENTRAL, "example") else FIXED_POINT)
    yield from _check_noise(found)
    torch.manual_seed(0)
    module, candidates = make_model(c), None
    replay = Replay(c, module, make_examples(c), found, product.streams(c))
    for number, (expected, seen) in enumerate(zip(replay.rounds(), found.rounds, strict=True)):
        place = f"round {number}"
        for problem in _compare_round(
            c, expected, seen, allowed, is_last=number == len(found.rounds) - 1
        ):
            yield f"{place}: {problem}"
        matching = _measured_sets(c, expected, seen, allowed)
        candidates = matching if candidates is None or matching is None else candidates & matching
        if matching is not None and not matching:
            first = next(_client_sets(c))
            wanted = expected.of_round | (expected.metrics(first) if expected.metrics else {})
            yield f"{place}: metrics {dict(seen.metrics)}, expected {wanted}"
    if candidates is not None and not candidates:
        yield OTHER_CLIENTS


def _compare_round(
    c: Configuration, expected: Expected, seen: Round, allowed: float, *, is_last: bool
) -> Iterator[str]:
    yield from _find_broken_invariants(seen, allowed)
    statuses = {row.client_id: row.status for row in seen.rows}
    if expected.statuses not in (None, statuses):
        yield f"statuses {statuses}, expected {expected.statuses}"
    for name, value in expected.tensors.items():
        if not close(seen.tensors[name], value, allowed):
            off = float((seen.tensors[name].double() - value).abs().max())
            yield f"tensor {name} is off by {off:.2e} of {float(value.abs().max()):.2e}"
    is_seen = c.secure == "off"  # a secure sum hides single losses
    reported = [row for row in seen.rows if row.status == "reported" and is_seen]
    losses = {row.client_id: row.loss for row in reported}
    pairs = {"of the round": (seen.train_loss, expected.train_loss)}
    pairs |= {
        f"of client {each}": (loss, expected.losses.get(each, math.nan))
        for each, loss in losses.items()
    }
    for name, (found, wanted) in pairs.items():
        if not number_close(found, wanted, allowed):
            yield f"training loss {name} {found}, expected {wanted}"
    if seen.staleness and dict(seen.staleness) != expected.staleness:
        yield f"staleness {dict(seen.staleness)}, expected {expected.staleness}"
    if c.checkpoints == "every_round" or is_last:
        yield from _compare_kept(expected, seen, allowed)


def _find_broken_invariants(seen: Round, allowed: float) -> Iterator[str]:
    """Yield violations of properties that hold after any round, whatever the reference says."""
    numbers = {**seen.tensors, **{name: torch.tensor(v) for name, v in seen.metrics.items()}}
    for name, value in numbers.items():
        if not value.isfinite().all():
            yield f"{name} is not finite"
        if name.endswith("running_var") and (value < 0).any():
            yield f"{name} has a negative variance"
    controls = [kept["control"] for kept in seen.kept.values() if "control" in kept]
    if controls and not close(seen.server["control"], sum_of(controls) / NUM_CLIENTS, allowed):
        yield "the server's control is not the mean of the clients' controls"


def _check_noise(found: Run) -> Iterator[str]:
    """Yield a problem if noise, in standard deviations, is larger or smaller than requested."""
    if found.noise:
        numbers = torch.cat([each.noise.flatten() for each in found.noise])
        deviation = float(numbers.square().mean().sqrt())
        if abs(deviation - 1.0) > DEVIATIONS / math.sqrt(2 * len(numbers)):
            yield f"noise has {deviation:.3f} of its standard deviation in {len(numbers)} numbers"


def _compare_kept(expected: Expected, seen: Round, allowed: float) -> Iterator[str]:
    if seen.kept.keys() != expected.kept.keys():
        yield f"clients {sorted(seen.kept)} keep something, expected {sorted(expected.kept)}"
        return
    for client_id, memory in expected.kept.items():
        for name, tensors in memory.items():
            values = list(tensors.values())
            is_count = name == "num_steps"
            flat = torch.stack([v.flatten()[0] for v in values]) if is_count else _flat(values)
            own = seen.kept[client_id].get(name)
            if own is None:
                yield f"client {client_id} does not keep its {name}"
            elif not close(own, flat, allowed):
                off = float((own.double() - flat).abs().max())
                yield f"{name} of client {client_id} is off by {off:.2e}"


def _flat(values: list[Tensor]) -> Tensor:
    return torch.cat([value.flatten() for value in values])


def _client_sets(c: Configuration) -> Iterator[tuple[int, ...]]:
    num = {"all": NUM_CLIENTS, "some": 3, "none": 0}[c.evaluated_clients]
    return itertools.combinations(range(NUM_CLIENTS), num)


def _measured_sets(
    c: Configuration, expected: Expected, seen: Round, allowed: float
) -> set[tuple[int, ...]] | None:
    """Return the sets of clients that explain the metrics; ``None`` if none are due or recorded."""
    own = expected.of_round
    if expected.metrics is None:
        return None if _same_metrics(seen.metrics, own, allowed) else set()
    return {
        each
        for each in _client_sets(c)
        if _same_metrics(seen.metrics, expected.metrics(each) | own, allowed)
    }


def _same_metrics(
    found: Mapping[str, float], expected: Mapping[str, float], allowed: float
) -> bool:
    return found.keys() == expected.keys() and all(
        number_close(found[name], value, allowed) for name, value in expected.items()
    )


def close(found: Tensor, expected: Tensor, allowed: float) -> bool:
    """Return whether tensors differ by at most ``allowed``, relative to the larger one or to 1."""
    if found.shape != expected.shape:
        return False
    off = (found.double() - expected).abs()
    return bool((off <= allowed * expected.abs().clamp(min=1.0)).all())


def number_close(found: float, expected: float, allowed: float) -> bool:
    """Return the same for numbers; NaN equals NaN."""
    if math.isnan(found) or math.isnan(expected):
        return math.isnan(found) and math.isnan(expected)
    return abs(found - expected) <= allowed * max(1.0, abs(expected))
