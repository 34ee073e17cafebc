"""What single clients measured in an evaluation, as a table: a row per client."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from html import escape
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from fedlearn.core.distribution import Direction, improvement_sign
from fedlearn.core.quantities import format_number
from fedlearn.core.words import did_you_mean, replace_unprintable

Row: TypeAlias = dict[str, Any]  # Any: a name, a number, or nothing
"""One client: ``client_id``, ``name``, ``num_examples``, and its metrics by name."""

#: Most clients that a notebook shows.
_MOST_SHOWN = 20
#: Prefix of the metrics of personal models.
PERSONAL = "personal_"


@dataclass(frozen=True, eq=False, kw_only=True)
class ClientMetrics:
    """What each evaluated client measured, as a table: a row per client.

    ``clients["hospital-1"]`` is the row of a client by its name, ``clients[3]`` that of a client by
    its id.

    Attributes:
        measured_after: Number of finished rounds at the evaluation.
        client_ids: The clients, ascending.
        num_examples: Number of examples that each was evaluated on, as it says.
        metrics: By metric, one value per client, NaN where it has none: shape [n] each. Those of
            personal models begin with ``personal_``.
        directions: Whether higher or lower is better, for the metrics that declare it.
        names: By id, the names of the clients that have one.

    Example:
        >>> clients = ClientMetrics(
        ...     measured_after=5,
        ...     client_ids=(0, 1, 2),
        ...     num_examples=(30, 10, 20),
        ...     metrics={"accuracy": np.array([0.9, 0.5, 0.7])},
        ...     directions={"accuracy": "max"},
        ...     names={0: "ada", 1: "zoe"},
        ... )
        >>> clients["zoe"]["accuracy"], clients[2]["num_examples"], len(clients)
        (0.5, 20, 3)
        >>> clients.worst_first().to_rows()[0]
        {'client_id': 1, 'name': 'zoe', 'num_examples': 10, 'accuracy': 0.5}
        >>> round(clients.mean("accuracy"), 2), clients.quantile("accuracy", 0.5)
        (0.7, 0.7)
    """

    measured_after: int
    client_ids: Sequence[int]
    num_examples: Sequence[int]
    metrics: Mapping[str, NDArray[np.float64]]
    directions: Mapping[str, Direction]
    names: Mapping[int, str] = field(default_factory=dict)

    def __len__(self) -> int:
        return len(self.client_ids)

    def __iter__(self) -> Iterator[Row]:
        return iter(self.to_rows())

    def __contains__(self, client: object) -> bool:
        return client in (self._places_by_name if isinstance(client, str) else self._places)

    def __getitem__(self, client: str | int) -> Row:
        if not isinstance(client, str):
            if client not in self._places:
                raise KeyError(f"client {client} was not evaluated; see to_rows() for all")
            return self._row(self._places[client])
        places = self._places_by_name.get(client, [])
        if not places:
            hint = did_you_mean(client, self._places_by_name)
            raise KeyError(f"no client {client!r} was evaluated; {hint}see to_rows() for all")
        if len(places) > 1:
            ids = [self.client_ids[place] for place in places]
            raise KeyError(f"several clients are called {client!r}; give one of their ids: {ids}")
        return self._row(places[0])

    def __repr__(self) -> str:
        parts = [f"{len(self)} clients after round {self.measured_after}"]
        for name in self.metrics:
            low, mean, high = (
                format_number(each)
                for each in (self.quantile(name, 0.0), self.mean(name), self.quantile(name, 1.0))
            )
            parts.append(f"{name} {mean} ({low} to {high})")
        return f"<ClientMetrics: {'; '.join(parts)}>"

    @property
    def leading_metric(self) -> str:
        """The metric by which clients are ranked: accuracy, else the loss, else the first.

        That of the personal models, if clients have them.
        """
        known = [name for name in self.metrics if name in self.directions] or list(self.metrics)
        wanted = [f"{kind}{name}" for kind in (PERSONAL, "") for name in ("accuracy", "loss")]
        return next((name for name in wanted if name in self.metrics), known[0])

    def finite(self, metric: str) -> NDArray[np.float64]:
        """Return the finite values of a metric, in the order of the clients."""
        values = self._column(metric)
        return values[np.isfinite(values)]

    def mean(self, metric: str) -> float:
        """Return the mean of a metric over the clients that have a value; NaN if none has."""
        values = self.finite(metric)
        return float(values.mean()) if values.size else np.nan

    def quantile(self, metric: str, fraction: float) -> float:
        """Return a quantile of a metric over the clients that have a value; NaN if none has.

        Args:
            metric: Name of the metric.
            fraction: In [0, 1]: 0.1 for the tenth percentile, 0.5 for the median.
        """
        values = self.finite(metric)
        return float(np.quantile(values, fraction)) if values.size else np.nan

    def worst_first(self, metric: str | None = None) -> "ClientMetrics":
        """Return the clients sorted by a metric, the worst first, those without a value last.

        A metric without a declared direction is sorted ascending.

        Args:
            metric: Name of the metric; ``None``: :attr:`leading_metric`.
        """
        name = self.leading_metric if metric is None else metric
        sign = improvement_sign(self.directions.get(name, "max"))
        order = np.argsort(sign * self._column(name), kind="stable")
        return replace(
            self,
            client_ids=[self.client_ids[place] for place in order],
            num_examples=[self.num_examples[place] for place in order],
            metrics={each: values[order] for each, values in self.metrics.items()},
        )

    def to_rows(self) -> list[Row]:
        """Return a dictionary per client, for example for ``pandas.DataFrame``."""
        return [self._row(place) for place in range(len(self))]

    def with_names(self, names: Mapping[int, str]) -> "ClientMetrics":
        """Return the same clients with names; those of other clients are left out."""
        known = {each: names[each] for each in self.client_ids if each in names}
        return replace(self, names=known)

    def _repr_html_(self) -> str:
        """Return the worst clients as an HTML table, for a notebook."""
        shown = self.worst_first().to_rows()[:_MOST_SHOWN]
        header = ("client", "examples", *self.metrics)
        cells = [
            (
                replace_unprintable(each["name"] or f"client {each['client_id']}"),
                f"{each['num_examples']:,}",
                *(format_number(each[name]) for name in self.metrics),
            )
            for each in shown
        ]
        head = "".join(f"<th>{escape(each)}</th>" for each in header)
        body = "".join(
            f"<tr>{''.join(f'<td>{escape(each)}</td>' for each in row)}</tr>" for row in cells
        )
        which = f"{len(self):,} clients after round {self.measured_after}, the worst first"
        more = f"; {len(self) - len(shown):,} more" if len(self) > len(shown) else ""
        return (
            f"<table><caption>{which}{more}</caption><thead><tr>{head}</tr></thead>"
            f"<tbody>{body}</tbody></table>"
        )

    @cached_property
    def _places(self) -> dict[int, int]:
        return {client_id: place for place, client_id in enumerate(self.client_ids)}

    @cached_property
    def _places_by_name(self) -> dict[str, list[int]]:
        places: dict[str, list[int]] = {}
        for place, client_id in enumerate(self.client_ids):
            if client_id in self.names:
                places.setdefault(self.names[client_id], []).append(place)
        return places

    def _row(self, place: int) -> Row:
        client_id = self.client_ids[place]
        own: Row = {
            "client_id": client_id,
            "name": self.names.get(client_id),
            "num_examples": self.num_examples[place],
        }
        # A client names its metrics as it likes, and must not replace its own id.
        measured = {
            name: float(values[place]) for name, values in self.metrics.items() if name not in own
        }
        return own | measured

    def _column(self, metric: str) -> NDArray[np.float64]:
        if metric not in self.metrics:
            known = ", ".join(self.metrics)
            raise KeyError(f"no client measured {metric!r}; give one of: {known}")
        return self.metrics[metric]


@dataclass(frozen=True, eq=False, kw_only=True)
class EvaluationOutcome:
    """The result of an evaluation.

    Attributes:
        metrics: Metrics for the record of the round, by name.
        clients: What single clients measured; ``None``: no client was evaluated, or only their sum
            is known.
    """

    metrics: Mapping[str, float]
    clients: ClientMetrics | None = None
