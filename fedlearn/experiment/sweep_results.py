"""The results of a sweep: a table over seeds, paired comparisons, a table of clients, a picture.

Nothing here imports torch, so that results are shown fast.
"""

import csv
import json
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import cached_property
from html import escape
from io import StringIO
from pathlib import Path
from statistics import fmean, stdev
from types import MappingProxyType
from typing import Literal, NamedTuple

import numpy as np
from pydantic import TypeAdapter, ValidationError

from fedlearn.config.addresses import Addresses
from fedlearn.core.client_metrics import ClientMetrics
from fedlearn.core.distribution import Direction, improvement_sign
from fedlearn.core.files import explain_disk_errors, write_durably
from fedlearn.core.json_values import to_json_values
from fedlearn.core.quantities import format_difference, format_number
from fedlearn.core.words import did_you_mean, replace_unprintable
from fedlearn.errors import ConfigError, StoreError
from fedlearn.experiment.clients import load_clients
from fedlearn.experiment.history import (
    best_point,
    direction_of,
    headline_metric,
    series,
)
from fedlearn.experiment.layout import table_text
from fedlearn.experiment.run import Run
from fedlearn.experiment.site import open_database
from fedlearn.rounds.records import RunRecord
from fedlearn.store.rounds import RoundSummary

SWEEP_FILE = "sweep.json"

#: Number of differences up to which all their signs are tried: 65,536 of them.
_MOST_SIGNED = 16
_CONFIDENCE = 0.95
#: Most clients in a table; of more, those with the worst values are shown.
_MOST_CLIENTS = 20
_METRIC = re.compile(r"(.+?)(?:@(best|[1-9][0-9]*))?")


# ---- What is recorded ---------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class VariantDescription:
    """What is recorded of a variant of a sweep.

    Attributes:
        name: Its name.
        varied: Its values by key of the grid.
        config: The configuration with its first seed, as it was given.
        objects: Descriptions of its parts that are Python objects.
        runs: Names of its runs by seed.
    """

    name: str
    varied: Mapping[str, object]
    config: Mapping[str, object]
    objects: Mapping[str, str]
    runs: Mapping[int, str]


@dataclass(frozen=True, kw_only=True)
class SweepDescription:
    """What is recorded of a sweep; the results are in the runs."""

    name: str
    seeds: tuple[int, ...]
    metrics: tuple[str, ...]
    baseline: str
    variants: tuple[VariantDescription, ...]


def has_sweep(folder: Path) -> bool:
    """Return whether a sweep was begun in a folder."""
    return (folder / SWEEP_FILE).is_file()


def write_description(description: SweepDescription, folder: Path) -> None:
    """Record a sweep in its folder."""
    content = json.dumps(asdict(description), indent=1, ensure_ascii=False).encode() + b"\n"
    write_durably(folder / SWEEP_FILE, content, raises=StoreError)


def read_description(folder: Path) -> SweepDescription:
    """Read what :func:`write_description` has written.

    Raises:
        StoreError: There is no sweep, or the file is damaged.
    """
    path = folder / SWEEP_FILE
    try:
        with explain_disk_errors(path, raises=StoreError, doing="read"):
            content = path.read_bytes()
        return TypeAdapter(SweepDescription).validate_json(content)
    except ValidationError as error:
        raise StoreError(
            f"{path} is damaged, or of another version of fedlearn; remove it and run the sweep "
            "again under another name"
        ) from error


# ---- What is chosen -----------------------------------------------------------------------


class ChosenMetric(NamedTuple):
    """A column of the table: a metric, and when.

    Attributes:
        text: As it was given.
        name: The metric.
        when: ``last``, ``best``, or the number of rounds after which it was measured.
    """

    text: str
    name: str
    when: Literal["last", "best"] | int

    def value(self, record: RunRecord, rounds: Sequence[RoundSummary]) -> float:
        """Return its value in a run; NaN if it was not measured then."""
        points = series(rounds, self.name)
        if self.when == "last":
            return points[-1].value if points else math.nan
        if self.when == "best":
            best = best_point(points, direction_of(record, self.name) or "max")
            return math.nan if best is None else best.value
        return next((each.value for each in points if each.num_finished == self.when), math.nan)


def parse_metric(text: str) -> ChosenMetric:
    """Read the name of a column.

    Raises:
        ConfigError: It is malformed.

    Example:
        >>> parse_metric("accuracy@20").when, parse_metric("loss").when
        (20, 'last')
    """
    found = _METRIC.fullmatch(text)
    if found is None or "@" in found[1]:
        raise ConfigError(
            f"metrics: {text!r} is not a metric, such as accuracy, accuracy@best or accuracy@20 "
            "(after round 20)"
        )
    when = found[2]
    if when is None or when == "best":
        return ChosenMetric(text, found[1], "last" if when is None else "best")
    return ChosenMetric(text, found[1], int(when))


# ---- Statistics ---------------------------------------------------------------------------


class PairedDifference(NamedTuple):
    """How one variant differs from the baseline, over the seeds that both have.

    Attributes:
        mean: Mean of the differences.
        low: Lower end of the 95 % interval of the mean, by Student's t; NaN with one seed.
        high: Its upper end.
        p: Two-sided p-value of the exact sign-flip test; NaN with more than 16 seeds.
        num_seeds: Number of seeds.
    """

    mean: float
    low: float
    high: float
    p: float
    num_seeds: int


def compare_pairs(ours: Sequence[float], baseline: Sequence[float]) -> PairedDifference:
    """Compare values that belong together in pairs, one of each for every seed.

    The interval is Student's, for differences that are normally distributed. The p-value needs no
    distribution: if the two were the same, each difference could as well have the other sign, and
    p is the share of all signs that give a mean at least as far from 0. With n seeds it is at least
    2^(1-n): 0.5 with two, 0.0625 with five.

    References:
        Student. The probable error of a mean. Biometrika 6, 1908.
        R. A. Fisher. The design of experiments, section 21. 1935.

    Example:
        >>> found = compare_pairs([0.8, 0.9, 0.7], [0.7, 0.7, 0.6])
        >>> round(found.mean, 4), round(found.low, 4), round(found.high, 4), found.p
        (0.1333, -0.0101, 0.2768, 0.25)
    """
    differences = np.asarray(ours) - np.asarray(baseline)
    num = len(differences)
    if num == 0:
        return PairedDifference(math.nan, math.nan, math.nan, math.nan, 0)
    mean, half, p = float(differences.mean()), math.nan, math.nan
    if num > 1:
        from scipy.stats import t  # noqa: PLC0415 (it takes a second)

        error = float(differences.std(ddof=1)) / math.sqrt(num)
        half = error * float(t.ppf((1 + _CONFIDENCE) / 2, num - 1))
    if num <= _MOST_SIGNED:
        bits = np.arange(2**num)[:, None] >> np.arange(num) & 1
        sums = np.abs((1 - 2 * bits) @ differences)
        # Rounding must not separate sums that are equal.
        p = float(np.mean(sums >= abs(differences.sum()) * (1 - 1e-9)))
    return PairedDifference(mean, mean - half, mean + half, p, num)


# ---- Results ------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class SweptRun:
    """One run of a sweep.

    Attributes:
        seed: Its seed.
        name: Its name in the store.
        record: Its record; ``None``: it has not begun.
        rounds: Its rounds so far.
        error: Why it failed; empty if it did not.
        clients: What its clients measured at the last evaluation; ``None``: nothing is kept.
    """

    seed: int
    name: str
    record: RunRecord | None
    rounds: Sequence[RoundSummary]
    error: str
    clients: ClientMetrics | None

    @property
    def status(self) -> str:
        """Its status in words."""
        if self.record is None:
            return "failed" if self.error else "not run"
        return self.record.status.value

    @property
    def is_done(self) -> bool:
        """Whether it counts in the table."""
        return self.status == "done"


@dataclass(frozen=True, kw_only=True)
class SweptVariant:
    """A variant of a sweep, with its runs in the order of the seeds."""

    name: str
    varied: Mapping[str, object]
    runs: tuple[SweptRun, ...]

    def by_seed(self, metric: str) -> dict[int, float]:
        """Return the finite values of a column of the table, by seed."""
        chosen = parse_metric(metric)
        found = {
            each.seed: chosen.value(each.record, each.rounds)
            for each in self.runs
            if each.is_done and each.record is not None
        }
        return {seed: value for seed, value in found.items() if math.isfinite(value)}

    def values(self, metric: str) -> list[float]:
        """Return the finite values of a column of the table, in the order of the seeds."""
        return list(self.by_seed(metric).values())

    @cached_property
    def client_metric(self) -> str | None:
        """The leading metric of the clients; ``None`` if none was evaluated.

        It is that of their personal models, if they have them.
        """
        measured = (each.clients for each in self.runs if each.is_done and each.clients)
        return next((each.leading_metric for each in measured), None)

    def by_client(self, metric: str | None = None) -> dict[str, list[float]]:
        """Return a metric of each client in the order of the seeds, where it was measured.

        Args:
            metric: Its name; ``None``: :attr:`client_metric`.
        """
        name, found = metric or self.client_metric, dict[str, list[float]]()
        for run in self.runs:
            if name is None or not run.is_done or run.clients is None:
                continue
            if name not in run.clients.metrics:
                continue
            for row in run.clients:
                if math.isfinite(row[name]):
                    client = row["name"] or f"client {row['client_id']}"
                    found.setdefault(client, []).append(row[name])
        return found

    def by_round(self, name: str) -> dict[int, list[float]]:
        """Return a metric of all runs by number of finished rounds."""
        found = dict[int, list[float]]()
        for run in self.runs:
            for point in series(run.rounds, name):
                found.setdefault(point.num_finished, []).append(point.value)
        return found


@dataclass(frozen=True, kw_only=True)
class SweepResults:
    """What a sweep has found so far. ``print`` shows the table.

    Attributes:
        description: What was to run.
        addresses: Locations of the store and the runs.
        variants: Each with its runs.
    """

    description: SweepDescription
    addresses: Addresses
    variants: tuple[SweptVariant, ...]

    @property
    def path(self) -> Path:
        """The folder of the sweep."""
        return self.addresses.runs_dir / self.description.name

    @cached_property
    def metrics(self) -> tuple[str, ...]:
        """The columns of the table: those that were asked for, else the leading metric and loss."""
        if self.description.metrics:
            return self.description.metrics
        names = {headline_metric(each.record): None for each in self._runs() if each.record}
        return tuple(
            name
            for name in (*names, "loss")
            if any(series(each.rounds, name) for each in self._runs())
        )

    @property
    def failed(self) -> list[tuple[str, SweptRun]]:
        """The runs that failed, each with its variant."""
        return [
            (variant.name, run)
            for variant in self.variants
            for run in variant.runs
            if run.status == "failed"
        ]

    def run(self, variant: str, seed: int) -> Run:
        """Return one run, with its history, report and weights.

        Raises:
            ConfigError: The sweep has no such variant or seed.
            StoreError: It has not begun.
        """
        runs = {each.seed: each for each in self._variant(variant).runs}
        if seed not in runs:
            raise ConfigError(f"seed {seed} is not in this sweep, which has {list(runs)}")
        return Run(open_database(self.addresses).run(runs[seed].name))

    def values(self, metric: str) -> dict[str, dict[int, float]]:
        """Return the values of a column of the table, by variant and seed."""
        return {each.name: each.by_seed(metric) for each in self.variants}

    def compare(self, metric: str) -> dict[str, PairedDifference]:
        """Compare each variant with the baseline, over the seeds that both have."""
        before = self._variant(self.description.baseline).by_seed(metric)
        found = dict[str, PairedDifference]()
        for each in self.variants:
            if each.name != self.description.baseline:
                values = each.by_seed(metric)
                seeds = [seed for seed in values if seed in before]
                found[each.name] = compare_pairs(
                    [values[seed] for seed in seeds], [before[seed] for seed in seeds]
                )
        return found

    def by_client(self, metric: str | None = None) -> dict[str, dict[str, list[float]]]:
        """Return a metric of each client by client and variant, in the order of the seeds.

        They are values of the last evaluation, of the clients that were in it.

        Args:
            metric: Its name; ``None``: the accuracy, else the loss, of the model that a client
                uses itself: its personal model if the variant makes one, else the global model.
        """
        found = dict[str, dict[str, list[float]]]()
        for variant in self.variants:
            for client, values in variant.by_client(metric).items():
                found.setdefault(client, {})[variant.name] = values
        return found

    def _runs(self) -> Iterator[SweptRun]:
        for each in self.variants:
            yield from each.runs

    def _variant(self, name: str) -> SweptVariant:
        for each in self.variants:
            if each.name == name:
                return each
        names = [each.name for each in self.variants]
        raise ConfigError(
            f"there is no variant {name!r}; {did_you_mean(name, names)}the sweep has {names}"
        )

    # ---- Texts ----------------------------------------------------------------------------

    def __str__(self) -> str:
        return self.render()

    def render(self, *, width: int | None = None) -> str:
        """Format the results as plain text, with tables cut to ``width`` columns if given."""
        seeds = self.description.seeds
        parts = [f"{self.description.name}: mean ± standard deviation, seeds {_list_seeds(seeds)}"]
        parts.append(table_text(self._table(), values_right=True, width=width))
        if comparison := self._comparison_table():
            parts += ["", _describe_comparison(self.description.baseline, len(seeds))]
            parts.append(table_text(comparison, values_right=True, width=width))
        if clients := self._client_table():
            parts += ["", self._describe_clients()]
            parts.append(table_text(clients, values_right=True, width=width))
        parts += [f"note: {each}" for each in self._notes()]
        parts += [
            replace_unprintable(f"failed: {variant}, seed {run.seed}: {run.error}")
            for variant, run in self.failed
        ]
        return "\n".join(parts)

    def _table(self) -> list[tuple[str, ...]]:
        counts = [sum(each.is_done for each in variant.runs) for variant in self.variants]
        num_seeds = len(self.description.seeds)
        is_whole = all(count == num_seeds for count in counts)
        rows = [("", *self.metrics, *(() if is_whole else ("runs",)))]
        for variant, count in zip(self.variants, counts, strict=True):
            cells = [format_spread(variant.values(each)) for each in self.metrics]
            more = () if is_whole else (f"{count} of {num_seeds}",)
            rows.append((replace_unprintable(variant.name), *cells, *more))
        return rows

    def _comparison_table(self) -> list[tuple[str, ...]]:
        header = ("", "metric", "difference", "95 % interval", "p", "seeds")
        rows: list[tuple[str, ...]] = [header]
        for metric in self.metrics:
            for name, found in self.compare(metric).items():
                if found.num_seeds:
                    interval = f"[{format_difference(found.low)}, {format_difference(found.high)}]"
                    more = (interval if found.num_seeds > 1 else "-", _format_p(found.p))
                    shown = replace_unprintable(name)
                    mean = format_difference(found.mean)
                    rows.append((shown, metric, mean, *more, str(found.num_seeds)))
        return rows if len(rows) > 1 else []

    def _client_table(self) -> list[tuple[str, ...]]:
        found, names = self.by_client(), [each.name for each in self.variants]
        sign = improvement_sign(self._client_direction())

        def rank(client: str) -> float:
            return sign * fmean(fmean(each) for each in found[client].values())

        shown = list(found)
        if len(found) > _MOST_CLIENTS:
            shown = sorted(found, key=rank)[:_MOST_CLIENTS]
        rows = [
            (
                replace_unprintable(client),
                *(format_spread(found[client].get(name, [])) for name in names),
            )
            for client in shown
        ]
        return [("", *map(replace_unprintable, names)), *rows] if rows else []

    def _client_direction(self) -> Direction:
        """Return whether high or low values of the clients' leading metric are better."""
        for run in self._runs():
            if run.clients is not None:
                return run.clients.directions.get(run.clients.leading_metric, "max")
        return "max"

    def _describe_clients(self) -> str:
        metrics = dict.fromkeys(each.client_metric for each in self.variants if each.client_metric)
        names = " or ".join(metrics)
        text = f"{names} of each client at the last evaluation"
        num_clients = len(self.by_client())
        if num_clients > _MOST_CLIENTS:
            text += f"; the {_MOST_CLIENTS} worst of {num_clients:,}"
        return text

    def _notes(self) -> Iterator[str]:
        for metric in self.metrics:
            if not any(self.values(metric).values()) and any(run.rounds for run in self._runs()):
                name = parse_metric(metric).name
                known = dict.fromkeys(
                    key for run in self._runs() for one in run.rounds[-1:] for key in one.metrics
                )
                hint = f"{did_you_mean(name, known)}there are {', '.join(known) or 'none'}"
                yield f"{metric} was not measured; {hint}"
        if any("@best" in metric for metric in self.metrics):
            yield "@best chooses the round by the values that it reports, so it is optimistic"

    def _repr_html_(self) -> str:
        tables = [self._table(), self._comparison_table(), self._client_table()]
        failed = "".join(
            f"<li>{escape(f'{variant}, seed {run.seed}: {run.error}')}</li>"
            for variant, run in self.failed
        )
        seeds = _list_seeds(self.description.seeds)
        texts = (
            f"{self.description.name}: mean ± standard deviation, seeds {seeds}",
            _describe_comparison(self.description.baseline, len(self.description.seeds)),
            self._describe_clients(),
        )
        shown = "".join(
            f"<p>{escape(text)}</p>{_html_table(table)}"
            for text, table in zip(texts, tables, strict=True)
            if table
        )
        return f"{shown}<p>Failed:</p><ul>{failed}</ul>" if failed else shown

    # ---- Files ----------------------------------------------------------------------------

    def facts(self) -> dict[str, object]:
        """Return the results as JSON values: the runs, the table and the comparisons."""
        return to_json_values(
            {
                "sweep": self.description.name,
                "seeds": self.description.seeds,
                "metrics": self.metrics,
                "baseline": self.description.baseline,
                "variants": [
                    {
                        "name": variant.name,
                        "varied": variant.varied,
                        "metrics": {
                            each: _describe_values(variant.values(each)) for each in self.metrics
                        },
                        "client_metric": variant.client_metric,
                        "runs": [
                            {
                                "seed": run.seed,
                                "run": run.name,
                                "status": run.status,
                                "error": run.error,
                                "metrics": {
                                    each: variant.by_seed(each).get(run.seed)
                                    for each in self.metrics
                                },
                            }
                            for run in variant.runs
                        ],
                    }
                    for variant in self.variants
                ],
                "clients": [
                    {
                        "client": client,
                        "variants": {
                            name: _describe_values(values) for name, values in by_variant.items()
                        },
                    }
                    for client, by_variant in self.by_client().items()
                ],
                "comparisons": [
                    {"metric": metric, "variant": name, **found._asdict()}
                    for metric in self.metrics
                    for name, found in self.compare(metric).items()
                ],
            }
        )

    def write(self) -> None:
        """Write ``results.json``, ``results.csv`` and ``figure.png`` to the folder of the sweep.

        Raises:
            StoreError: They cannot be written.
        """
        facts = json.dumps(self.facts(), indent=1, ensure_ascii=False).encode() + b"\n"
        write_durably(self.path / "results.json", facts, raises=StoreError)
        write_durably(self.path / "results.csv", self._csv().encode(), raises=StoreError)
        if any(run.rounds for run in self._runs()):
            self.plot()

    def _csv(self) -> str:
        """Format one line a run: its values of the grid, then its metrics."""
        keys = list(dict.fromkeys(key for each in self.variants for key in each.varied))
        lines = StringIO()
        writer = csv.writer(lines, lineterminator="\n")
        writer.writerow(["variant", *keys, "seed", "run", "status", *self.metrics, "error"])
        columns = {each: self.values(each) for each in self.metrics}
        for variant in self.variants:
            for run in variant.runs:
                values = (columns[each][variant.name].get(run.seed, "") for each in self.metrics)
                varied = (variant.varied.get(key, "") for key in keys)
                row = [variant.name, *varied, run.seed, run.name, run.status, *values, run.error]
                writer.writerow(row)
        return lines.getvalue()

    def plot(self, path: Path | str | None = None) -> Path:
        """Draw the first metric by round and by variant as PNG; by default ``figure.png``."""
        from fedlearn.experiment.sweep_plot import (  # noqa: PLC0415 (half a second)
            VariantCurve,
            draw_sweep,
        )

        metric = next(iter(self.metrics), "accuracy")
        curves = [
            VariantCurve(each.name, each.by_round(parse_metric(metric).name), each.values(metric))
            for each in self.variants
        ]
        title = f"{self.description.name}, {len(self.description.seeds)} seeds"
        return draw_sweep(
            title, metric, curves, self.path / "figure.png" if path is None else Path(path)
        )


def load_results(
    description: SweepDescription,
    addresses: Addresses,
    *,
    errors: Mapping[str, str] = MappingProxyType({}),
) -> SweepResults:
    """Read the results of a sweep from its runs.

    Args:
        description: The sweep.
        addresses: Locations of the store and the runs.
        errors: By run, why it failed, for those that failed before they had a record.

    Raises:
        StoreError: The store cannot be read.
    """
    with open_database(addresses) as database:
        records = {each.name: each for each in database.runs()}

        def read(seed: int, name: str) -> SweptRun:
            record = records.get(name)
            if record is None:
                error = errors.get(name, "")
                return SweptRun(
                    seed=seed, name=name, record=None, rounds=(), error=error, clients=None
                )
            stored = database.run(name)
            return SweptRun(
                seed=seed,
                name=name,
                record=record,
                rounds=stored.round_summaries(record.num_rounds),
                error=record.error or errors.get(name, ""),
                clients=load_clients(stored),
            )

        variants = tuple(
            SweptVariant(
                name=each.name,
                varied=each.varied,
                runs=tuple(read(seed, each.runs[seed]) for seed in description.seeds),
            )
            for each in description.variants
        )
    return SweepResults(description=description, addresses=addresses, variants=variants)


def load_sweep_results(addresses: Addresses, name: str) -> SweepResults:
    """Read the results of the sweep called ``name``.

    Raises:
        StoreError: There is no such sweep, or the store cannot be read.
    """
    folder = addresses.runs_dir / name
    if not has_sweep(folder):
        known = sorted(each.parent.name for each in addresses.runs_dir.glob(f"*/{SWEEP_FILE}"))
        raise StoreError(
            f"there is no sweep called {name!r} in {addresses.runs_dir}; "
            f"{did_you_mean(name, known)}there are {', '.join(known) or 'none'}"
        )
    return load_results(read_description(folder), addresses)


def format_spread(values: Sequence[float]) -> str:
    """Format a mean and the standard deviation of a sample; one value has no deviation.

    Example:
        >>> format_spread([0.8, 0.9]), format_spread([0.8]), format_spread([])
        ('0.8500 ± 0.0707', '0.8000', '-')
    """
    if not values:
        return "-"
    mean = format_number(fmean(values))
    return mean if len(values) == 1 else f"{mean} ± {format_number(stdev(values))}"


def _format_p(p: float) -> str:
    return f"{p:.3g}" if math.isfinite(p) else "-"


def _describe_values(values: Sequence[float]) -> dict[str, object]:
    return {
        "num_seeds": len(values),
        "mean": fmean(values) if values else None,
        "std": stdev(values) if len(values) > 1 else None,
    }


def _list_seeds(seeds: Sequence[int]) -> str:
    if len(seeds) > 2 and list(seeds) == list(range(seeds[0], seeds[-1] + 1)):  # noqa: PLR2004
        return f"{seeds[0]} to {seeds[-1]}"
    return ", ".join(map(str, seeds))


def _describe_comparison(baseline: str, num_seeds: int) -> str:
    text = f"difference to {replace_unprintable(baseline)} with the same seeds"
    if num_seeds > _MOST_SIGNED:
        return f"{text}; interval of Student's t"
    least = 2.0 ** (1 - num_seeds)
    return (
        f"{text}; interval of Student's t, p of the exact sign-flip test, at least {least:.3g} "
        f"with {num_seeds} seed{'' if num_seeds == 1 else 's'}"
    )


def _html_table(rows: Sequence[Sequence[str]]) -> str:
    head, *body = (
        "".join(f"<{tag}>{escape(cell)}</{tag}>" for cell in row)
        for tag, row in zip(["th", *["td"] * len(rows)], rows, strict=False)
    )
    return f"<table><tr>{head}</tr>{''.join(f'<tr>{row}</tr>' for row in body)}</table>"
