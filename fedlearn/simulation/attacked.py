"""Puts attackers into a simulation: they poison their examples and forge their updates."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fedlearn.algorithms.aggregations import (
    Aggregation,
    RobustAggregation,
    combine,
    combines_all,
    min_updates,
)
from fedlearn.algorithms.bounds import UpdateBounds, refusal
from fedlearn.algorithms.lanes import DELTA, Aggregate, LaneSpec, Updates
from fedlearn.algorithms.strategy import StrategyWrapper
from fedlearn.core.params import Layout
from fedlearn.core.randomness import Seed
from fedlearn.errors import ConfigError, RoundError
from fedlearn.simulation.attacks import Attack
from fedlearn.simulation.population import ArrayPopulation, Population
from fedlearn.simulation.reduction import select_rows


def draw_attackers(num_attackers: int, *, num_clients: int, seed: Seed) -> tuple[int, ...]:
    """Draw the ids of the attackers, in ascending order.

    Example:
        >>> len(draw_attackers(3, num_clients=10, seed=Seed(0)))
        3
    """
    drawn = seed.derive("attackers").numpy().choice(num_clients, num_attackers, replace=False)
    return tuple(sorted(drawn.tolist()))


def poison_population(
    population: Population, attack: Attack, attackers: Sequence[int], *, seed: Seed
) -> Population:
    """Return the population whose attackers have poisoned examples; the others are unchanged.

    Raises:
        ConfigError: The examples are not in memory, have no classes or several inputs, or the
            attack does not fit them.
    """
    if not attack.poisons:
        return population
    if (
        not isinstance(population, ArrayPopulation)
        or population.num_classes is None
        or not isinstance(population.features, Tensor)
    ):
        raise ConfigError(
            f"attack.kind: {type(attack).__name__} changes examples, which must be in memory, of "
            "one input and with classes as labels; use other data, or an attack on updates"
        )
    features, labels = population.features.clone(), population.labels.clone()
    for client_id in attackers:
        own = torch.from_numpy(population.load(np.asarray([client_id])).rows)
        try:
            features[own], labels[own] = attack.poison(
                features[own],
                labels[own],
                num_classes=population.num_classes,
                seed=seed.derive("poison", client_id),
            )
        except ValueError as error:
            raise ConfigError(f"attack.{error}") from error
    return replace(population, features=features, labels=labels)


@dataclass(frozen=True)
class AttackedAggregation(RobustAggregation):
    """Replaces the attackers' updates by forged ones, and combines all by the rule of the run.

    Here all updates of a round meet, wherever their clients train. The record has the number of
    attackers among them.

    Attributes:
        rule: The rule of the run.
        attack: What the attackers do.
        attackers: Their ids.
        lanes: Lanes of an update.
        bounds: Bounds of the run, by which forged updates are refused as well; ``None``: none.
        layout: Layout of the model.
        seed: Seed of the run.
    """

    rule: Aggregation[Any]  # Any: each rule has its own type of state
    attack: Attack
    attackers: frozenset[int]
    lanes: Sequence[LaneSpec]
    bounds: UpdateBounds | None
    layout: Layout
    seed: Seed

    @property
    def min_updates(self) -> int:
        """The rule's."""
        return min_updates(self.rule)

    def weigh(self, num_examples_B: Tensor) -> Tensor:
        """Return the rule's weights."""
        return self.rule.weigh(num_examples_B)

    def combine(self, updates: Updates) -> Aggregate:
        """Forge the updates of the attackers, and combine what the coordinator accepts.

        Raises:
            RoundError: It accepts too few.
        """
        ids = updates.client_ids
        places = [place for place, each in enumerate(ids) if each in self.attackers]
        # The order of arrival depends on where the run takes place.
        places.sort(key=ids.__getitem__)
        if places and self.attack.forges:
            updates = self._keep_accepted(self._forge(updates, places), places)
        if combines_all(self.rule):
            aggregate = combine(self.rule, updates)
        else:
            device = updates.weights_B.device
            state = self.rule.init(self.lanes, self.layout, device=device)
            aggregate = self.rule.finalize(self.rule.accumulate(state, updates))
        return replace(
            aggregate, metrics={**aggregate.metrics, "num_attackers": float(len(places))}
        )

    def _forge(self, updates: Updates, places: Sequence[int]) -> Updates:
        num_trained = self.layout.num_trainable
        rows = list(updates.lanes[DELTA.name])
        trained = torch.stack([rows[place][:num_trained] for place in places])
        forged = self.attack.forge(
            trained,
            num_updates=len(rows),
            seed=self.seed.derive("attack", max(updates.based_on)),
        )
        for place, delta in zip(places, forged, strict=True):
            rows[place] = torch.cat([delta, rows[place][num_trained:]])
        return replace(updates, lanes={**updates.lanes, DELTA.name: torch.stack(rows)})

    def _keep_accepted(self, updates: Updates, places: Sequence[int]) -> Updates:
        """Drop the forged updates that are beyond the bounds."""
        refused = {
            place
            for place in places
            if refusal(
                {name: rows[place] for name, rows in updates.lanes.items()},
                self.lanes,
                layout=self.layout,
                bounds=self.bounds,
            )
        }
        kept = [place for place in range(len(updates.client_ids)) if place not in refused]
        if not kept:
            raise RoundError("all updates of the round are forged and beyond updates.max_norm")
        return select_rows(updates, np.asarray(kept))


@dataclass(frozen=True)
class Attacked(StrategyWrapper):
    """A strategy some of whose clients attack.

    Attributes:
        attack: What the attackers do.
        attackers: Their ids.
        layout: Layout of the model.
        seed: Seed of the run.
    """

    attack: Attack
    attackers: frozenset[int]
    layout: Layout
    seed: Seed

    @property
    def aggregation(self) -> AttackedAggregation:
        """The inner strategy's, after the attack."""
        return AttackedAggregation(
            rule=self.inner.aggregation,
            attack=self.attack,
            attackers=self.attackers,
            lanes=self.lanes,
            bounds=self.bounds,
            layout=self.layout,
            seed=self.seed,
        )
