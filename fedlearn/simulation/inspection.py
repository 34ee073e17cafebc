"""Inspect a population: how clients differ in their numbers of examples and in their labels."""

import html
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy.sparse import csr_array, vstack
from scipy.special import gammaln, xlog1py, xlogy
from torch import Tensor

from fedlearn.algorithms.objectives import IGNORED
from fedlearn.core.features import name_inputs
from fedlearn.core.words import replace_unprintable
from fedlearn.simulation.partition import client_text
from fedlearn.simulation.population import Population, client_names, load_in_blocks

_EXAMPLES_AT_ONCE = 1 << 15
#: Sizes for which the distance by chance is computed; it is interpolated between them.
_NUM_SIZES = 200
_QUANTILES = (0.0, 0.1, 0.5, 0.9, 1.0)
_IN_SVG, _BAR, _HEIGHT = 60, 9, 90
#: Colors that differ for people with color vision deficiency, too (Okabe and Ito), then repeated.
_COLORS = ("#0072B2", "#E69F00", "#009E73", "#D55E00", "#CC79A7", "#56B4E9", "#F0E442", "#555555")


@dataclass(frozen=True)
class InputRange:
    """One input of the model, or the labels: its kind and its smallest and largest value."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    low: float
    high: float

    def __str__(self) -> str:
        shape = f" [{', '.join(map(str, self.shape))}]" if self.shape else ""
        return f"{self.name} {self.dtype}{shape}, {self.low:.6g} to {self.high:.6g}"


@dataclass(frozen=True, eq=False, kw_only=True)
class Inspection:
    """What was found about a population.

    Sizes are of all C clients, labels of the n inspected ones.

    Attributes:
        sizes_C: Number of examples of each client.
        client_ids: The inspected clients; all, unless there were too many.
        counts: Labels of each inspected client, a sparse matrix [n, K]; ``None``: labels are not
            classes, or were not read.
        label_values: The smallest, mean and largest label of each inspected client: [n, 3];
            ``None``: they are classes, or were not read.
        ranges: The inputs and the labels of the inspected clients.
        names: The clients' names in the data; ``None``: they have no names.
        tests_C: Number of examples that each client is evaluated on; ``None``: it has no tests of
            its own.
        shifts: The shift of each inspected client's features, in words; empty: there is none.
        class_names: Names of the classes, by label; ``None``: labels are numbers in the data.
    """

    sizes_C: NDArray[np.int64]
    client_ids: NDArray[np.int64]
    counts: csr_array | None = field(repr=False)
    label_values: NDArray[np.float64] | None = field(repr=False)
    ranges: Sequence[InputRange]
    names: NDArray[Any] | None = field(repr=False)
    tests_C: NDArray[np.int64] | None = field(repr=False)
    shifts: Sequence[str] = field(repr=False)
    class_names: Sequence[str] | None = field(repr=False)

    @property
    def gini(self) -> float:
        """Gini coefficient of the sizes: 0 if all clients have as many examples."""
        sizes = np.sort(self.sizes_C).astype(np.float64)
        ranks = np.arange(1, len(sizes) + 1)
        found = 2 * (ranks * sizes).sum() / (len(sizes) * sizes.sum()) - 1 - 1 / len(sizes)
        return max(0.0, float(found))  # rounding may leave a little less

    @cached_property
    def pooled_K(self) -> NDArray[np.float64]:
        """Share of each class among the labels of the inspected clients."""
        assert self.counts is not None
        totals = np.asarray(self.counts.sum(axis=0), np.float64).ravel()
        shares: NDArray[np.float64] = totals / max(1.0, float(totals.sum()))
        return shares

    @cached_property
    def num_labels_n(self) -> NDArray[np.int64]:
        """Number of different classes of each inspected client."""
        assert self.counts is not None
        numbers: NDArray[np.int64] = np.diff(self.counts.indptr).astype(np.int64)
        return numbers

    @cached_property
    def distances_n(self) -> NDArray[np.float64]:
        """Total variation distance of each inspected client's labels to the pooled labels.

        From 0, the same shares, to 1, no class in common.
        """
        shares, rows, pooled = self._shares()
        # sum |p - q| is that over the client's classes, and q summed over all others.
        own = np.abs(shares - pooled) - pooled
        sums = np.bincount(rows, own, minlength=len(self.client_ids)).astype(np.float64)
        distances: NDArray[np.float64] = 0.5 * (1.0 + sums)
        return distances

    @cached_property
    def entropies_n(self) -> NDArray[np.float64]:
        """Entropy of each inspected client's labels, in bits."""
        shares, rows, _ = self._shares()
        terms = -shares * np.log2(shares)
        return np.bincount(rows, terms, minlength=len(self.client_ids)).astype(np.float64)

    @property
    def pooled_entropy(self) -> float:
        """Entropy of the pooled labels, in bits."""
        some = self.pooled_K[self.pooled_K > 0]
        return float(-(some * np.log2(some)).sum())

    @cached_property
    def chance_distance(self) -> float:
        """Mean distance if each client drew as many labels from the pooled ones at random.

        References:
            Diaconis and Zabell, 1991, `Closed Form Summation for Classical Distributions
            <https://doi.org/10.1214/ss/1177011699>`_ (De Moivre's mean absolute deviation).
        """
        assert self.counts is not None
        numbers = np.asarray(self.counts.sum(axis=1)).ravel().astype(np.int64)
        sizes = np.unique(numbers)
        at = np.unique(np.linspace(0, len(sizes) - 1, min(len(sizes), _NUM_SIZES)).astype(int))
        shares = self.pooled_K[(self.pooled_K > 0) & (self.pooled_K < 1)]
        found = [_expect_distance(int(n), shares) for n in sizes[at]]
        return float(np.interp(numbers, sizes[at], found).mean())

    def _shares(self) -> tuple[NDArray[np.float64], NDArray[np.int64], NDArray[np.float64]]:
        """Return, by client and class that it has: the share, the client's place, the pooled."""
        assert self.counts is not None
        rows = np.repeat(np.arange(len(self.client_ids)), self.num_labels_n)
        totals = np.bincount(rows, self.counts.data, minlength=len(self.client_ids))
        return self.counts.data / totals[rows], rows, self.pooled_K[self.counts.indices]

    def client(self, place: int) -> str:
        """Format an inspected client for people."""
        return replace_unprintable(client_text(int(self.client_ids[place]), self.names))

    def label(self, number: int) -> str:
        """Format a class for people: its name, if it has one."""
        names = self.class_names or ()
        return replace_unprintable(names[number]) if number < len(names) else str(number)

    def top_labels(self, place: int, num: int) -> list[tuple[int, int]]:
        """Return an inspected client's most frequent classes, each with its count."""
        assert self.counts is not None
        own = slice(*self.counts.indptr[place : place + 2])
        labels, counts = self.counts.indices[own], self.counts.data[own]
        order = np.lexsort((labels, -counts))[:num]
        return [(int(labels[each]), int(counts[each])) for each in order]

    def figures(self) -> dict[str, Any]:  # Any: JSON values
        """Return the summary as JSON values."""
        found: dict[str, Any] = {
            "num_clients": len(self.sizes_C),
            "num_inspected": len(self.client_ids),
            "num_examples": int(self.sizes_C.sum()),
            "sizes": _quantiles(self.sizes_C),
            "gini": self.gini,
            "inputs": [vars(each) for each in self.ranges],
        }
        if self.tests_C is not None:
            found["test_sizes"] = _quantiles(self.tests_C)
        if self.counts is not None:
            found |= {
                "num_classes": int((self.pooled_K > 0).sum()),
                "class_names": self.class_names,
                "pooled_labels": {
                    str(label): share for label, share in enumerate(self.pooled_K) if share
                },
                "labels_per_client": _quantiles(self.num_labels_n),
                "mean_distance": float(self.distances_n.mean()),
                "chance_distance": self.chance_distance,
                "mean_entropy": float(self.entropies_n.mean()),
                "pooled_entropy": self.pooled_entropy,
            }
        return found

    def client_figures(self, place: int) -> dict[str, Any]:  # Any: JSON values
        """Return what was found about one inspected client as JSON values."""
        client_id = int(self.client_ids[place])
        name = None if self.names is None else self.names[client_id]
        found: dict[str, Any] = {
            "client": client_id,
            "name": name.item() if isinstance(name, np.generic) else name,
            "num_examples": int(self.sizes_C[client_id]),
        }
        if self.tests_C is not None:
            found["num_tests"] = int(self.tests_C[client_id])
        if self.counts is not None:
            labels = sorted(self.top_labels(place, self.counts.shape[1]))
            found["labels"] = {str(label): count for label, count in labels}
            found["distance"] = float(self.distances_n[place])
            found["entropy"] = float(self.entropies_n[place])
        if self.label_values is not None:
            names = ("label_min", "label_mean", "label_max")
            found |= zip(names, self.label_values[place].tolist(), strict=True)
        if self.shifts:
            found["shift"] = self.shifts[place]
        return found

    def facts(self) -> list[tuple[str, str]]:
        """Return the summary as labeled texts."""
        found = self.figures()
        clients = f"{found['num_clients']:,}"
        if found["num_inspected"] < found["num_clients"] and self.ranges:
            clients += f"; labels and features of {found['num_inspected']:,}, evenly spread"
        sizes = _describe_quantiles(found["sizes"])
        facts = [
            ("clients", clients),
            ("examples", f"{found['num_examples']:,}; a client {sizes}; Gini {self.gini:.2f}"),
        ]
        if self.tests_C is not None:
            facts.append(("own tests", f"a client {_describe_quantiles(found['test_sizes'])}"))
        if self.counts is not None:
            labels = _describe_quantiles(found["labels_per_client"])
            skew = (
                f"distance to the pooled labels {found['mean_distance']:.2f} on average, "
                f"{found['chance_distance']:.2f} by chance (total variation, 0 to 1); "
                f"entropy {found['mean_entropy']:.2f} bits, pooled {self.pooled_entropy:.2f}"
            )
            classes = f"{found['num_classes']:,}; a client {labels}"
            facts += [("classes", classes), ("label skew", skew)]
        return [*facts, *((each.name, str(each).partition(" ")[2]) for each in self._list_ranges())]

    def _list_ranges(self) -> Sequence[InputRange]:
        """Return the ranges to show; the range of classes says nothing."""
        return [each for each in self.ranges if self.counts is None or each.name != "labels"]

    def _repr_html_(self) -> str:
        """Return the summary for a notebook, with the labels of some clients as bars."""
        rows = "".join(
            f"<tr><th style='text-align:left'>{html.escape(label)}</th>"
            f"<td style='text-align:left'>{html.escape(text)}</td></tr>"
            for label, text in self.facts()
        )
        return f"<table>{rows}</table>{self._draw_bars()}"

    def _draw_bars(self) -> str:
        """Draw a bar for each of some clients, as high as its share of each class."""
        if self.counts is None:
            return ""
        last = len(self.client_ids) - 1
        shown = np.unique(np.linspace(0, last, min(_IN_SVG, last + 1)).astype(int))
        bars = []
        for x, place in enumerate(shown.tolist()):
            total, below = int(self.counts[[place]].sum()), 0.0
            parts = sorted(self.top_labels(place, 50))
            title = ", ".join(f"{self.label(label)}: {count}" for label, count in parts[:12])
            text = html.escape(f"{self.client(place)}: {title}")
            bars.append(f"<g><title>{text}</title>")
            for label, count in parts:
                height = _HEIGHT * count / max(1, total)
                bars.append(
                    f'<rect x="{x * _BAR}" y="{below:.1f}" width="{_BAR - 1}" '
                    f'height="{height:.1f}" fill="{_COLORS[label % len(_COLORS)]}"/>'
                )
                below += height
            bars.append("</g>")
        width = len(shown) * _BAR
        return (
            f'<svg width="{width}" height="{_HEIGHT}" role="img" '
            f'aria-label="Labels of {len(shown)} clients">{"".join(bars)}</svg>'
        )


def inspect_population(
    population: Population,
    *,
    has_classes: bool,
    client_ids: NDArray[np.int64],
    tests: Population | None,
    shifts: Sequence[str],
    class_names: Sequence[str] | None,
) -> Inspection:
    """Read the examples of some clients, and count.

    Args:
        population: All clients.
        has_classes: Whether labels are classes.
        client_ids: The clients to inspect, in ascending order; none: sizes only.
        tests: The clients with their own tests; ``None``: there are none.
        shifts: See :class:`Inspection`.
        class_names: See :class:`Inspection`.

    Raises:
        DataError: An example cannot be read.
    """
    everyone = np.arange(population.num_clients)
    counts, values, ranges = list[csr_array](), list[NDArray[np.float64]](), list[InputRange]()
    blocks = load_in_blocks(population, client_ids, num_examples=_EXAMPLES_AT_ONCE)
    for rows in blocks:
        features, labels = rows.gather()
        own = _measure({**name_inputs(features), "labels": labels})
        ranges = list(map(_widen, ranges, own)) if ranges else own
        per_client = labels.reshape(len(labels), -1).numpy()
        owners = np.repeat(np.arange(len(rows.offsets) - 1), np.diff(rows.offsets))
        if has_classes:
            counts.append(_count(per_client, owners, num_clients=len(rows.offsets) - 1))
        else:
            values.append(_summarize(per_client, rows.offsets))
    width = max((each.shape[1] for each in counts), default=0)
    for each in counts:
        each.resize((each.shape[0], width))
    return Inspection(
        sizes_C=population.num_examples(everyone),
        client_ids=client_ids,
        counts=csr_array(vstack(counts, format="csr")) if counts else None,
        label_values=np.concatenate(values) if values else None,
        ranges=ranges,
        names=client_names(population),
        tests_C=None if tests is None else tests.num_examples(everyone),
        shifts=shifts,
        class_names=class_names,
    )


def _count(
    labels: NDArray[Any], owners: NDArray[np.int64], *, num_clients: int
) -> csr_array:  # one row a client, one column a class
    owners = np.repeat(owners, labels.shape[1])
    flat = labels.ravel()
    is_class = flat != IGNORED
    flat, owners = flat[is_class], owners[is_class]
    shape = (num_clients, int(flat.max(initial=0)) + 1)
    counted = csr_array((np.ones(len(flat), np.int64), (owners, flat)), shape=shape)
    counted.sum_duplicates()
    return counted


def _summarize(labels: NDArray[Any], offsets: NDArray[np.int64]) -> NDArray[np.float64]:
    """Return the smallest, mean and largest label of each client: [n, 3]."""
    starts, sizes = offsets[:-1], np.diff(offsets)
    return np.stack(
        [
            np.minimum.reduceat(labels.min(1), starts),
            np.add.reduceat(labels.mean(1, dtype=np.float64), starts) / sizes,
            np.maximum.reduceat(labels.max(1), starts),
        ],
        axis=1,
    ).astype(np.float64)


def _measure(inputs: Mapping[str, Tensor]) -> list[InputRange]:
    return [
        InputRange(
            name=name,
            dtype=str(values.dtype).removeprefix("torch."),
            shape=tuple(values.shape[1:]),
            low=float(values.numpy().min()) if values.numel() else np.nan,
            high=float(values.numpy().max()) if values.numel() else np.nan,
        )
        for name, values in inputs.items()
    ]


def _widen(one: InputRange, other: InputRange) -> InputRange:
    low, high = min(one.low, other.low), max(one.high, other.high)
    return InputRange(one.name, one.dtype, one.shape, low, high)


def _expect_distance(num: int, shares: NDArray[np.float64]) -> float:
    """Return the expected distance of ``num`` draws to the shares that they are drawn from.

    Each count is binomial, whose mean absolute deviation is ``2 v (1 - p) P(X = v)`` with
    ``v = floor(n p) + 1``.
    """
    if num < 1:
        return 0.0
    v = np.minimum(np.floor(num * shares) + 1.0, num)
    logs = gammaln(num + 1.0) - gammaln(v + 1.0) - gammaln(num - v + 1.0)
    logs += xlogy(v, shares) + xlog1py(num - v, -shares)
    return float((2.0 * v * (1.0 - shares) * np.exp(logs)).sum() / (2.0 * num))


def _quantiles(values: NDArray[np.int64]) -> dict[str, float]:
    names = ("min", "p10", "median", "p90", "max")
    found = np.quantile(values, _QUANTILES).tolist()
    return dict(zip(names, found, strict=True)) | {"mean": float(values.mean())}


def _describe_quantiles(found: Mapping[str, float]) -> str:
    if found["min"] == found["max"]:
        return f"{found['min']:,.0f}"
    return (
        f"{found['min']:,.0f} to {found['max']:,.0f}, median {found['median']:,.0f}, "
        f"80% of them {found['p10']:,.0f} to {found['p90']:,.0f}"
    )
