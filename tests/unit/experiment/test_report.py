"""The report: complete, self-contained, and safe to open even if texts in it are hostile."""

import json
import math
import re
from base64 import b64decode
from collections.abc import Mapping, Sequence
from dataclasses import replace
from html.parser import HTMLParser
from io import BytesIO
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from matplotlib.image import imread

from fedlearn.config import Config, config_hash
from fedlearn.core.client_metrics import ClientMetrics
from fedlearn.core.messages import ClientId
from fedlearn.core.participations import Participation, Participations, Status
from fedlearn.errors import StoreError
from fedlearn.experiment.report import render_page, report
from fedlearn.rounds.records import Outcome, RoundRecord, RunRecord, RunStatus

HOSTILE = "</title></pre><script>alert(1)</script><img src=x onerror='a()'>\"&\x1b\ud800\u202e"
VOID = {"meta", "link", "br", "img"}
SVG = {"rect", "path", "circle", "polyline", "polygon", "image"}


class Outline(HTMLParser):
    """The elements of a page: checks nesting, collects texts and attributes."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.tags: list[tuple[str, dict[str, str]]] = []
        self.texts: list[str] = []
        self.feed(text)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        """Note an element."""
        self.tags.append((tag, {name: value or "" for name, value in attrs}))
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        """Note an empty element."""
        self.tags.append((tag, {name: value or "" for name, value in attrs}))

    def handle_endtag(self, tag: str) -> None:
        """Check that a closing tag matches the last open one."""
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        """Note a text."""
        self.texts.append(data)

    def count(self, tag: str, style: str) -> int:
        """Return how many elements have a CSS class."""
        return sum(t == tag and style in a.get("class", "").split() for t, a in self.tags)

    def after(self, text: str) -> str:
        """Return the text that follows ``text``."""
        return self.texts[self.texts.index(text) + 1]


def run(name: str = "brisk-otter-17", *, seed: int = 0) -> RunRecord:
    """Make the record of a finished run of the default configuration."""
    config = Config(seed=seed)
    return RunRecord(
        name=name,
        status=RunStatus.DONE,
        error="",
        created_utc="2026-01-05T10:20:30Z",
        num_rounds=20,
        config=json.loads(config.canonical_json()),
        config_hash=config_hash(config),
        versions={"fedlearn": "0.1.0", "torch": "2.13.0"},
    )


def make_round(
    k: int,
    statuses: Mapping[int, Status],
    metrics: Mapping[str, float] | None = None,
    *,
    reason: str = "gone",
    outcome: Outcome = Outcome.AGGREGATED,
) -> RoundRecord:
    """Make round ``k``, in which clients ended with ``statuses``."""
    return RoundRecord(
        round_num=k,
        attempt=0,
        outcome=outcome,
        participations=Participations.of(
            Participation(ClientId(c), s, 1.0, 5, 0.5, reason if s is Status.FAILED else "")
            for c, s in statuses.items()
        ),
        train_loss=1.0 / (k + 1),
        duration_s=60.0,
        virtual_s=60.0 * (k + 1),
        seconds=0.5,
        metrics=metrics or {},
    )


GOOD, LATE, BAD = Status.REPORTED, Status.LATE, Status.FAILED
SPREAD = {"mean": 0.6, "p10": 0.31, "p50": 0.62, "p90": 0.93, "worst_decile": 0.2}
ROUNDS: Sequence[RoundRecord] = (
    make_round(0, {1: GOOD, 2: GOOD, 3: LATE}, {"accuracy": 0.5, "loss": 1.5}),
    make_round(1, {1: GOOD, 4: BAD, 5: GOOD}, {"accuracy": 0.8125, "loss": 0.7}),
    make_round(
        2,
        {1: GOOD, 2: LATE, 4: BAD},
        {"accuracy": 0.75, "loss": 0.9} | {f"clients/accuracy_{k}": v for k, v in SPREAD.items()},
    ),
)


@pytest.fixture(scope="module")
def usual() -> str:
    """The page of these rounds; it takes most of a second to draw, so tests share it."""
    return render_page(run(), ROUNDS)


def test_the_tiles_are_the_runs_figures(usual: str) -> None:
    """Best value and its round, last values, rounds, times and clients, computed by hand."""
    outline = Outline(usual)
    tiles = {
        "best accuracy": "0.8125",
        "final accuracy": "0.7500",
        "final loss": "0.9000",
        "rounds": "3 / 20",
        "virtual time": "3m 00s",
        "real time": "1.5 s",
        "clients seen": "5",
        "reports": "5",
    }
    assert {name: outline.after(name) for name in tiles} == tiles
    assert outline.after("0.8125") == "after round 2"
    assert outline.after("5") == "asked 9 times"


@pytest.mark.slow
def test_the_watched_metric_has_tiles_and_a_curve() -> None:
    """It replaces the accuracy, and its best follows its own direction."""
    own = {"metrics": {"dose": {"direction": "min"}}, "early_stopping": {"metric": "dose"}}
    config = {**run().config, **own}
    dosed = [make_round(k, {1: GOOD}, {"dose": dose}) for k, dose in enumerate((3.0, 1.0, 2.0))]
    text = render_page(replace(run(), config=config), dosed)
    outline = Outline(text)
    assert (outline.after("best dose"), outline.after("final dose")) == ("1.0000", "2.0000")
    assert "Dose by round" in text


def test_the_quantiles_over_clients_stand_in_their_table(usual: str) -> None:
    """In the order of the headings."""
    texts = [text for text in Outline(usual).texts if text.strip()]
    start = texts.index("worst tenth, mean") + 1
    expected = ["accuracy", "0.6000", "0.3100", "0.6200", "0.9300", "0.2000"]
    assert texts[start : start + 6] == expected


@pytest.mark.slow
def measure_clients(num_clients: int, *, name: str = "ada") -> ClientMetrics:
    return ClientMetrics(
        measured_after=3,
        client_ids=list(range(num_clients)),
        num_examples=[1234] * num_clients,
        metrics={
            "accuracy": np.linspace(1, 0, num_clients),
            "personal_accuracy": np.append(np.linspace(0.5, 1, num_clients - 1), np.nan),
        },
        directions={"accuracy": "max", "personal_accuracy": "max"},
        names={0: name},
    )


def test_the_worst_and_the_best_clients_are_named() -> None:
    """By their own models; all are in one table if they are few. Those without a value are last."""
    page = Outline(render_page(run(), ROUNDS, clients=measure_clients(30)))
    texts = [text for text in page.texts if text.strip()]
    for title, first in (
        ("Worst personal_accuracy", "ada"),
        ("Best personal_accuracy", "client 28"),
    ):
        place = texts.index(title)
        header = ["client", "examples", "accuracy", "personal_accuracy"]
        assert texts[place + 1 : place + 7] == [*header, first, "1,234"]
    assert "client 15" not in texts
    assert "client 29" not in texts
    few = Outline(render_page(run(), ROUNDS, clients=measure_clients(4))).texts
    assert "client 3" in few
    assert few.index("All clients, the worst personal_accuracy first") < few.index("ada")


def test_a_name_of_a_client_is_escaped_and_a_drawing_shows_the_distribution() -> None:
    """Control: without clients there is neither."""
    name = "<script>alert(1)</script>\x1b, Ü"
    page = render_page(run(), ROUNDS, clients=measure_clients(4, name=name))
    assert "<script>" not in page
    assert "&lt;script&gt;alert(1)&lt;/script&gt;\N{REPLACEMENT CHARACTER}, Ü" in page
    assert "Clients by value" in page
    assert re.search(r"<title>[\d.]+ to [\d.]+: \d accuracy, \d personal_accuracy</title>", page)
    assert "Clients by value" not in render_page(run(), ROUNDS)


def test_means_by_examples_have_a_column_where_they_were_measured(usual: str) -> None:
    """The column is the last one, and absent if nothing was measured so."""
    assert "mean by examples" not in usual
    spread = {"mean": 0.6, "by_examples": 0.7}
    measured = {"loss": 1.0} | {f"clients/dose_{part}": v for part, v in spread.items()}
    outline = Outline(render_page(run(), [make_round(0, {1: GOOD}, measured)]))
    shown = [text for text in outline.texts if text.strip()]
    start = shown.index("mean by examples") + 1
    assert shown[start : start + 7] == ["dose", "0.6000", "-", "-", "-", "-", "0.7000"]


def test_the_map_has_a_cell_for_each_client_asked(usual: str) -> None:
    """Each cell is colored by the client's status, with a tooltip."""
    cells = re.findall(r"<title>client (\d+), round (\d+): (\w+)</title>", usual)
    assert sorted((int(c), int(r), s) for c, r, s in cells) == [
        *((1, 1, "reported"), (1, 2, "reported"), (1, 3, "reported")),
        *((2, 1, "reported"), (2, 3, "late"), (3, 1, "late")),
        *((4, 2, "failed"), (4, 3, "failed"), (5, 2, "reported")),
    ]
    path = r'<title>client (\d+), [^<]*</title>\s*<path d="M [\d.]+ ([\d.]+)'
    rows = {int(client): float(y) for client, y in re.findall(path, usual)}
    assert sorted(rows, key=rows.__getitem__) == [1, 2, 4, 3, 5]  # most often asked first


@pytest.mark.slow
def test_a_report_to_a_skipped_round_was_only_selected(usual: str) -> None:
    """Its work is not in the model, so it is not shown as reported."""
    skipped = make_round(0, {1: GOOD, 2: LATE}, outcome=Outcome.SKIPPED)
    text = render_page(run(), [skipped])
    assert "<title>client 1, round 1: selected</title>" in text
    assert "<title>client 2, round 1: late</title>" in text
    assert "its round was skipped" in text
    assert "selected" not in usual.split("Clients by rounds")[1]


@pytest.mark.slow
def test_the_curves_tell_their_values_when_pointed_at(usual: str) -> None:
    """Each position has one tooltip for all lines."""
    assert "<title>round 2: accuracy 0.8125</title>" in usual
    assert "<title>round 2: evaluation 0.7000, training 0.5000</title>" in usual
    assert "<title>virtual time (minutes) 2: accuracy 0.8125</title>" in usual
    assert "<title>round 2: 2 reported, 0 late, 1 failed</title>" in usual


@pytest.mark.slow
def test_a_curve_goes_through_its_points(usual: str) -> None:
    """The heights of the path's points are proportional to the values: from 0.5 to 0.8125."""
    line = r'<path d="(M[^"]*)"[^>]* style="fill: none; stroke: var\(--0072b2, #0072b2\)'
    corners = re.search(line, usual)
    assert corners is not None
    points = [tuple(map(float, each.split()[1:])) for each in corners[1].strip().split("\n")]
    first, second, third = (x for x, _ in points)
    assert second - first == pytest.approx(third - second)
    heights = [y for _, y in points]
    share = (heights[0] - heights[2]) / (heights[0] - heights[1])
    assert share == pytest.approx((0.75 - 0.5) / (0.8125 - 0.5), abs=0.01)


@pytest.mark.slow
def test_failure_reasons_are_counted_and_the_rare_ones_left_out() -> None:
    """The table has the 20 most frequent reasons."""
    rounds = [make_round(k, {1: BAD}, reason=f"reason {k % 30:02d}") for k in range(60)]
    outline = Outline(render_page(run(), rounds))
    first = outline.texts.index("reason 00")
    assert outline.texts[first - 2 : first] == ["2", "3.3 %"]
    assert "reason 19" in outline.texts
    assert "reason 20" not in outline.texts
    assert "10 rarer reasons are not shown." in outline.texts


@pytest.mark.slow
def test_how_to_reproduce_is_a_command_and_a_configuration_that_loads() -> None:
    """The configuration is TOML for ``fedlearn simulate``, shown with versions and hash."""
    record = run(seed=7)
    outline = Outline(render_page(record, ROUNDS))
    assert "fedlearn simulate experiment.toml" in outline.texts
    assert "seed = 7" in "".join(outline.texts)
    assert outline.after("torch") == "2.13.0"
    assert outline.after("configuration SHA-256") == record.config_hash


@pytest.mark.slow
def test_a_configuration_of_another_program_is_shown_as_json(usual: str) -> None:
    """A run started from Python cannot be reproduced by a command, so none is shown."""
    assert "fedlearn simulate" in usual  # the control
    foreign = replace(run(), config={"python": {"model": HOSTILE}})
    text = render_page(foreign, ROUNDS)
    assert "fedlearn simulate" not in text
    assert "&#34;python&#34;" in text


@pytest.mark.slow
def test_nothing_hostile_becomes_markup(tmp_path: Path) -> None:
    """Name, error, reasons, versions, configuration and metric names are escaped."""
    metrics = {"accuracy": 0.5, f"clients/{HOSTILE}_mean": 0.5}
    record = replace(
        run(HOSTILE),
        error=HOSTILE,
        created_utc=HOSTILE,
        config_hash=HOSTILE,
        versions={HOSTILE: HOSTILE},
        config={HOSTILE: {"a": HOSTILE}, "early_stopping": {"metric": HOSTILE}},
    )
    rounds = [make_round(0, {1: BAD, 2: GOOD}, metrics, reason=HOSTILE)]
    outline = Outline(report(record, rounds, tmp_path / "report.html").read_text())
    tags = {tag for tag, _ in outline.tags}
    assert not tags & {"script", "img", "iframe", "object", "link", "a", "form"}
    assert not any(name.startswith("on") for _, attributes in outline.tags for name in attributes)
    assert any("<script>alert(1)</script>" in text for text in outline.texts)  # seen, as text
    assert not any("\x1b" in text or "\u202e" in text for text in outline.texts)


@pytest.fixture(scope="module")
def tame() -> list[tuple[str, dict[str, str]]]:
    """The elements of a page without hostile text."""
    return Outline(render_page(run(), [make_round(0, {1: BAD})])).tags


@pytest.mark.slow
@settings(max_examples=5, deadline=None)
@given(st.text(max_size=30), st.text(max_size=30))
def test_any_name_and_reason_keep_the_page_well_formed(
    tame: list[tuple[str, dict[str, str]]], name: str, reason: str
) -> None:
    """The elements are the same as those of the tame page."""
    wild = Outline(render_page(run(name), [make_round(0, {1: BAD}, reason=reason)])).tags
    assert [tag for tag, _ in wild] == [tag for tag, _ in tame]


def test_the_page_asks_the_network_for_nothing(usual: str) -> None:
    """It has no external address and no script, and its content policy would block both."""
    outline = Outline(usual)
    policy = [a["content"] for tag, a in outline.tags if "http-equiv" in a]
    assert policy == ["default-src 'none'; style-src 'unsafe-inline'; img-src data:"]
    links = [a[k] for _, a in outline.tags for k in ("src", "href", "xlink:href") if k in a]
    assert all(link.startswith(("data:", "#")) for link in links)
    namespaces = re.compile(r'xmlns(:xlink)?="[^"]*"')  # names that look like addresses
    assert not re.search(r"https?:|@import|url\((?!#)", namespaces.sub("", usual))


@pytest.mark.slow
@pytest.mark.parametrize(
    "rounds",
    [
        [],
        [make_round(0, {})],
        [make_round(0, {1: GOOD})],
        [make_round(0, {1: GOOD}, {"accuracy": math.nan, "loss": math.inf})],
        [make_round(k, {1: GOOD}, {"loss": 0.5}) for k in range(2)],
        [make_round(k, {1: GOOD}, {"accuracy": 1.0 + 1e-16 * k}) for k in range(3)],
        [replace(make_round(0, {1: LATE}), train_loss=math.nan)],
        [make_round(5, {1: GOOD}, {"clients/accuracy_p10": 0.1})],
    ],
    ids=["none", "nobody", "unevaluated", "nan", "flat", "almost-flat", "no-loss", "only-p10"],
)
def test_gaps_are_no_error(rounds: list[RoundRecord], tmp_path: Path) -> None:
    """A page is written even with missing values, without a NaN in the drawing."""
    text = report(run(), rounds, tmp_path / "report.html").read_text()
    numbers = " ".join(v for t, a in Outline(text).tags if t in SVG for v in a.values())
    assert not re.search(r"\b(nan|inf)\b", numbers)


@pytest.mark.slow
def test_a_failed_run_shows_its_error() -> None:
    """At the top, with the status."""
    failed = replace(run(), status=RunStatus.FAILED, error="round 3: 2 usable reports")
    outline = Outline(render_page(failed, []))
    assert outline.after("Failed:").strip() == "round 3: 2 usable reports"
    assert outline.count("span", "failed") == 1
    assert outline.count("p", "error") == 1
    assert Outline(render_page(run(), [])).count("p", "error") == 0


@pytest.mark.slow
def test_a_thousand_rounds_of_a_thousand_clients_stay_small() -> None:
    """The map shows the most active clients and binned rounds as an image, and says so."""
    rng = np.random.default_rng(3)
    kinds = [GOOD, GOOD, GOOD, LATE, BAD]
    rounds = [
        make_round(k, {int(c): kinds[int(c + k) % 5] for c in rng.choice(1000, 50, replace=False)})
        for k in range(1000)
    ]
    text = render_page(run(), rounds)
    assert len(text) < 400_000
    assert "Shown are the 200 of 1,000 clients" in text
    assert "A column is 2 rounds" in text
    image = re.search(r'href="data:image/png;base64,([^"]+)"', text)
    assert image is not None
    pixels = imread(BytesIO(b64decode(image[1])))
    assert pixels.shape == (200, 500, 4)
    asked = {client: np.zeros(1000, dtype=bool) for client in range(1000)}
    for one in rounds:
        for each in one.participations:
            asked[each.client_id][one.round_num] = True
    most = sorted(asked, key=lambda client: (-asked[client].sum(), client))[:200]
    expected = np.stack([asked[client].reshape(500, 2).any(axis=1) for client in most])
    np.testing.assert_array_equal(pixels[:, :, 3] > 0, expected)


@pytest.mark.slow
def test_a_column_of_several_rounds_shows_the_worst() -> None:
    """Failed over late over reported, in the image's own colors."""
    kinds = {0: (GOOD, BAD), 1: (LATE, GOOD), 2: (GOOD, GOOD)}
    rounds = [
        make_round(k, {c: statuses[k % 2] for c, statuses in kinds.items()}) for k in range(1200)
    ]
    text = render_page(run(), rounds)
    titled = re.findall(r"<title>client (\d+), round 1 to 3: (\w+)</title>", text)
    assert dict(titled) == {"0": "failed", "1": "late", "2": "reported"}


@pytest.mark.slow
def test_the_file_is_replaced_as_a_whole(tmp_path: Path) -> None:
    """No temporary file is left, and a path that cannot be written raises StoreError."""
    path = tmp_path / "report.html"
    path.write_text("old")
    assert report(run(), ROUNDS, path) == path
    assert path.read_text().startswith("<!doctype html>")
    assert list(tmp_path.iterdir()) == [path]
    with pytest.raises(StoreError, match=r"missing.report\.html"):
        report(run(), ROUNDS, tmp_path / "missing" / "report.html")


def test_the_page_has_a_light_and_a_dark_look(usual: str) -> None:
    """Both define the same colors; black in drawings is replaced by a themed color."""
    assert "#000000" not in re.sub(r"var\(--000000, #000000\)", "", usual)
    assert "--000000: var(--ink)" in usual
    light, dark = (
        re.search(pattern, usual, re.DOTALL)
        for pattern in (r":root \{(.*?)\}\n@media", r"scheme: dark\) \{ :root \{(.*?)\}")
    )
    assert light is not None
    assert dark is not None
    assert re.findall(r"--\w+", light[1]) == re.findall(r"--\w+", dark[1])
