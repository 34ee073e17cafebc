"""The query that answers a plan of statistics.

All statistics of a round travel in one sum, each scaled by its share of the noise budget. So a
round is one release with one charge, and later rounds do not ask for statistics of one round again.
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Annotated

import torch
from annotated_types import doc
from torch import Tensor

from fedlearn.algorithms.lanes import Lanes
from fedlearn.algorithms.query import Query, SumSpec
from fedlearn.algorithms.strategy import State
from fedlearn.core.features import Features
from fedlearn.core.messages import ClientId
from fedlearn.errors import ConfigError
from fedlearn.statistics.plan import CLIENT, EXAMPLE, StatisticsPlan
from fedlearn.statistics.schema import ClientTable
from fedlearn.statistics.statistic import ResultRow

#: The only sum.
ANSWERS = "answers"
#: The metric that counts the statistics that need another round.
NUM_OPEN = "unfinished"
_ROUND = "round_num"
#: In the state: the ids of the clients whose own numbers are shown, and prefix of those.
_CLIENTS, _OF_CLIENTS = "clients", "of_clients/"


@dataclass(frozen=True, kw_only=True)
class StatisticsQuery(Query):
    """Asks clients for the statistics of a plan; it takes the plan's number of rounds.

    Raises:
        ValueError: The plan is not valid.

    Example:
        >>> query = StatisticsQuery(plan='{"columns": {"age": {"kind": "number"}}, '
        ...                              '"statistics": [{"kind": "count", "columns": ["age"]}]}')
        >>> query.sums
        {'answers': SumSpec(shape=(2,), bound=None, by_examples=False, example_bound=None)}
    """

    plan: Annotated[str, doc("The plan as JSON.")]
    unit: Annotated[str, doc('What privacy hides: "client", or "example": one row of a table.')] = (
        CLIENT
    )

    def __post_init__(self) -> None:
        if self.unit not in (CLIENT, EXAMPLE):
            raise ValueError(f'unit is {self.unit!r}; give "{CLIENT}" or "{EXAMPLE}"')
        try:
            _ = self.parsed
        except ConfigError as error:  # at a client, the coordinator's settings are wrong
            raise ValueError(f"plan: {error}") from error
        # Clients judge the field, so it has to say what the plan does.
        if self.per_client != self.parsed.per_client:
            raise ValueError(
                f"per_client is {self.per_client!r}, but the plan's is {self.parsed.per_client!r}; "
                "use StatisticsQuery.of"
            )

    @classmethod
    def of(cls, plan: StatisticsPlan, *, unit: str = CLIENT) -> "StatisticsQuery":
        """Build the query of a plan."""
        return cls(plan=plan.to_json(), unit=unit, per_client=plan.per_client)

    @property
    def parsed(self) -> StatisticsPlan:
        """The plan."""
        return _parse(self.plan)

    @property
    def sums(self) -> Mapping[str, SumSpec]:
        """One vector of all statistics."""
        plan = self.parsed
        example_bound = plan.row_bound if self.unit == EXAMPLE else None
        spec = SumSpec(shape=(plan.size,), bound=plan.bound, example_bound=example_bound)
        return {ANSWERS: spec}

    def init(self) -> State:
        """Return the first states of the statistics."""
        plan = self.parsed
        return _join([each.init(plan.columns) for each in plan.statistics], round_num=0)

    def broadcast(self, state: State) -> Lanes:
        """Broadcast the round's number, and what its statistics need."""
        plan, round_num = self.parsed, int(state[_ROUND])
        states, active = _split(state, len(plan.statistics)), plan.active(round_num)
        needed = [
            each.broadcast(states[place]) if place in active else {}
            for place, each in enumerate(plan.statistics)
        ]
        return _join(needed, round_num=round_num)

    def answer(self, features: Features, labels: Tensor, *, broadcast: Lanes) -> Lanes:
        """Add up the client's rows, scaled; places that the round does not use are zeros."""
        plan, round_num = self.parsed, int(broadcast[_ROUND])
        table = ClientTable.from_features(features, labels, plan.columns)
        if self.unit == CLIENT:
            # One row more or less changes the choice, so where a row is hidden, all count, and the
            # sums are scaled down to the bound.
            table = table.limit(plan.max_examples)
        states, scales = _split(broadcast, len(plan.statistics)), plan.scales(round_num)
        answers = torch.zeros(plan.size, dtype=torch.float64)
        for place, part in self._parts(round_num):
            measured = plan.statistics[place].measure(table, plan.columns, states[place])
            answers[part] = measured * scales[place]
        return {ANSWERS: answers}

    def conclude(
        self, sums: Lanes, state: State, *, num_clients: int
    ) -> tuple[State, Mapping[str, float]]:
        """Let each statistic of the round take its part; record how many are not finished."""
        plan, round_num = self.parsed, int(state[_ROUND])
        scales, states = plan.scales(round_num), list(_split(state, len(plan.statistics)))
        for place, part in self._parts(round_num):
            states[place] = plan.statistics[place].step(
                sums[ANSWERS][part].double() / scales[place],
                states[place],
                schema=plan.columns,
                round_num=round_num,
            )
        is_open = [
            not each.is_done(own, schema=plan.columns, round_num=round_num)
            for each, own in zip(plan.statistics, states, strict=True)
        ]
        of_clients = {
            name: value for name, value in state.items() if name.startswith((_CLIENTS, _OF_CLIENTS))
        }
        after = _join(states, round_num=round_num + 1)
        return {**after, **of_clients}, {NUM_OPEN: float(sum(is_open))}

    def conclude_clients(self, answers: Mapping[ClientId, Lanes], state: State) -> State:
        """Add the numbers of single clients after the first round, which asks all statistics."""
        if int(state[_ROUND]) > 1:
            return state
        plan, scales = self.parsed, self.parsed.scales(0)
        rows = torch.stack([each[ANSWERS] for each in answers.values()]).double()
        states, found = _split(state, len(plan.statistics)), dict[str, Tensor]()
        for place, part in self._parts(0):
            if place in plan.places_per_client:
                statistic, sums = plan.statistics[place], rows[:, part] / scales[place]
                shown = statistic.show_clients(sums, states[place], schema=plan.columns)
                found[f"{_OF_CLIENTS}{place}"] = shown
        return {**state, **found, _CLIENTS: torch.tensor(list(answers))}

    def client_rows(self, state: State) -> dict[ClientId, list[ResultRow]]:
        """Return the numbers of each client, by id; empty if the plan asks for none.

        Args:
            state: The run's last state.
        """
        plan, found = self.parsed, dict[ClientId, list[ResultRow]]()
        if not plan.per_client:
            return found
        for row, client_id in enumerate(state[_CLIENTS].tolist()):
            found[ClientId(client_id)] = [
                each
                for place in plan.places_per_client
                for each in plan.statistics[place].rows(
                    {"sums": state[f"{_OF_CLIENTS}{place}"][row]}, schema=plan.columns, sigmas=None
                )
            ]
        return found

    def result_rows(self, state: State, *, sigma: float | None) -> Iterator[ResultRow]:
        """Yield the numbers of all statistics from the state after the last round.

        Args:
            state: The run's last state.
            sigma: Standard deviation of the noise in each number of a round's sum; ``None``: there
                is none.
        """
        plan = self.parsed
        scales = [plan.scales(round_num) for round_num in range(plan.num_rounds)]
        states = _split(state, len(plan.statistics))
        for place, (each, own) in enumerate(zip(plan.statistics, states, strict=True)):
            sigmas = (
                None
                if sigma is None
                else [sigma / scale[place] for scale in scales[: each.count_rounds(plan.columns)]]
            )
            yield from each.rows(own, schema=plan.columns, sigmas=sigmas)

    def _parts(self, round_num: int) -> Iterator[tuple[int, slice]]:
        """Yield the places of a round's statistics, and where their numbers are in the sum."""
        plan, start = self.parsed, 0
        for place in plan.active(round_num):
            end = start + plan.statistics[place].size(plan.columns)
            yield place, slice(start, end)
            start = end


@cache
def _parse(text: str) -> StatisticsPlan:
    try:
        values = json.loads(text)
    except ValueError as error:
        raise ConfigError(f"it is not JSON: {error}; give StatisticsPlan.to_json()") from error
    return StatisticsPlan.of(values)


def _join(states: Sequence[State], *, round_num: int) -> State:
    """Join the states of statistics under names with their places."""
    joined = {
        f"{place}/{name}": value
        for place, state in enumerate(states)
        for name, value in state.items()
    }
    return {_ROUND: torch.tensor(round_num), **joined}


def _split(state: State, num_statistics: int) -> list[State]:
    """Undo :func:`_join`."""
    found = [dict[str, Tensor]() for _ in range(num_statistics)]
    for key, value in state.items():
        place, _, name = key.partition("/")
        if place.isdecimal():
            found[int(place)][name] = value
    return list[State](found)
