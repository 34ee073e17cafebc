"""Calls a strategy's methods and checks what they return, since strategies may be custom code.

Each check fails with an error that names the method, instead of a failure later in the round.
"""

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any, cast

import torch
from torch import Tensor

from fedlearn.algorithms.lanes import Aggregate, Lanes, describe_misfit
from fedlearn.algorithms.local import names_sent_once, read_only, require_broadcast
from fedlearn.algorithms.metrics import RESERVED, explain_reserved
from fedlearn.algorithms.strategy import State, StepResult, Strategy
from fedlearn.core.params import Params
from fedlearn.errors import RoundError


def call_begin(strategy: Strategy, params: Params) -> StepResult:
    """Call ``strategy.begin`` for the initial model and state, and convert metrics to floats.

    Raises:
        RoundError: A value of the state is not a tensor, or a metric is not a number.
    """
    begun, who = strategy.begin(params), type(strategy).__name__
    made_by = "init" if type(strategy).begin is Strategy.begin else "begin"
    _require_state(begun.state, who=f"{who}.{made_by}")
    return replace(begun, metrics=_to_floats(begun.metrics, who=f"{who}.begin"))


def call_at(strategy: Strategy, state: State) -> Strategy:
    """Call ``strategy.at`` for the strategy of one round.

    Raises:
        RoundError: It returned something that is not a strategy, or raised ValueError, as for a
            strategy that does not fit the one with which the run began.
    """
    try:
        found: object = strategy.at(state)
    except ValueError as error:
        raise RoundError(f"{type(strategy).__name__}.at: {error}") from error
    # isinstance cannot check the protocol, and a strategy need not inherit from it.
    if not hasattr(found, "step"):
        raise RoundError(
            f"{type(strategy).__name__}.at returned {type(found).__name__}; it returns a strategy, "
            "such as dataclasses.replace(self, ...)"
        )
    return cast("Strategy", found)


def call_broadcast(strategy: Strategy, state: State, params: Params) -> Lanes:
    """Call ``strategy.broadcast`` for the vectors to broadcast together with the model.

    Raises:
        RoundError: A vector does not have the declared length, or is missing.
    """
    broadcast = strategy.broadcast(state)
    try:
        require_broadcast(broadcast, strategy.broadcasts, params.layout)
    except ValueError as error:
        raise RoundError(f"{type(strategy).__name__}.broadcast: {error}") from error
    return broadcast


def select_sent_once(strategy: Strategy, state: State, params: Params) -> Lanes:
    """Return the part of the broadcast that a client is sent once.

    Raises:
        RoundError: As :func:`call_broadcast`.
    """
    names = names_sent_once(strategy.broadcasts)
    broadcast = call_broadcast(strategy, state, params) if names else {}
    return {name: broadcast[name] for name in names}


def call_step(strategy: Strategy, params: Params, aggregate: Aggregate, state: State) -> StepResult:
    """Call ``strategy.step`` on the aggregate of a round; add the aggregate's metrics to its own.

    Raises:
        RoundError: The lanes of the aggregate are not those declared, or the step wrote to its
            arguments, or it returned a model that is not finite or differs from the previous one in
            shape or dtype, a state with a value that is not a tensor, or a metric that is not a
            number.
    """
    rule, who = type(strategy.aggregation).__name__, type(strategy).__name__
    if not isinstance(aggregate.lanes, Mapping):
        raise RoundError(
            f"the aggregation {rule} returned {type(aggregate.lanes).__name__} instead of lanes"
        )
    problem = None
    # A custom strategy need not inherit from Strategy.
    if not getattr(strategy, "has_own_aggregate", False):
        problem = describe_misfit(aggregate.lanes, strategy.lanes, params.layout)
    if problem is not None:
        raise RoundError(f"the aggregation {rule} returned lanes that do not fit: {problem}")
    try:
        with read_only((params.vector, *state.values()), who=f"{who}.step"):
            stepped = strategy.step(params, aggregate, state)
    except ValueError as error:
        raise RoundError(str(error)) from error
    if not isinstance(stepped, StepResult):
        raise RoundError(f"{who}.step returned {type(stepped).__name__}; it returns a StepResult")
    _require_model(stepped.params.vector, params, aggregate, who=who, rule=rule)
    _require_state(stepped.state, who=f"{who}.step")
    of_rule = _to_floats(aggregate.metrics, who=f"the aggregation {rule}")
    return replace(stepped, metrics=of_rule | _to_floats(stepped.metrics, who=f"{who}.step"))


def _require_state(state: Mapping[str, object], *, who: str) -> None:
    for name, value in state.items():
        if not isinstance(value, Tensor):
            raise RoundError(
                f"{who} returned the state {name!r} as {type(value).__name__}; it must be a "
                "tensor, since it is saved in checkpoints"
            )


def _require_model(
    vector: Tensor, params: Params, aggregate: Aggregate, *, who: str, rule: str
) -> None:
    before = params.vector
    if vector.shape != before.shape or vector.dtype != before.dtype:
        raise RoundError(
            f"{who}.step returned a model of shape {tuple(vector.shape)}, {vector.dtype}; it is "
            f"{tuple(before.shape)}, {before.dtype}, like the previous one"
        )
    # If the sum is finite, all values are, and a sum is cheaper than a test of each value. A sum of
    # finite values may overflow, so test each one only if the sum is not finite.
    if not (math.isfinite(vector.sum()) or torch.isfinite(vector).all()):
        sound = all(torch.isfinite(lane).all() for lane in aggregate.lanes.values())
        cause = f"{who}.step" if sound else f"the aggregation {rule}"
        raise RoundError(
            f"{cause} gave values that are not finite; the clients' updates were. Lower the "
            "learning rates, the server's too, or fix the computation"
        )


def _to_floats(
    metrics: Mapping[str, Any],  # Any: not checked yet
    *,
    who: str,
) -> dict[str, float]:
    found = {}
    for name, value in metrics.items():
        if name in RESERVED:
            raise RoundError(f"{who} returned a metric of that name: {explain_reserved(name)}")
        try:
            found[name] = float(value)
        except (TypeError, ValueError, RuntimeError) as error:
            raise RoundError(
                f"{who} returned the metric {name!r} as {type(value).__name__}; a metric is "
                "one number"
            ) from error
    return found
