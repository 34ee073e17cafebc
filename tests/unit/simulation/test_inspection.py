"""How clients differ: figures against plain arithmetic, the table, the picture and the command."""

import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from torch.utils.data import Dataset, TensorDataset

import fedlearn as fl
from fedlearn.algorithms.objectives import IGNORED
from fedlearn.cli.app import main
from fedlearn.experiment.inspection import render_inspection

RNG = np.random.default_rng(0)
X = RNG.random((300, 4)).astype("float32")
Y = RNG.integers(0, 5, 300)
OWNERS = RNG.integers(0, 6, 300)
NAMES = np.array(["ada", "bob", "Ünna, <b>", "zoe\x1b[2J", "$x$", "<script>"])


def natural(labels: Any = Y) -> fl.FederatedData:
    return fl.from_arrays(
        X, labels, groups=NAMES[OWNERS], partition=fl.Natural(), test=(X[:9], labels[:9]), seed=0
    )


def size_of(picture: Path) -> tuple[int, int]:
    with Image.open(picture) as image:
        return image.size


class Unread(Dataset[Any]):
    """A dataset of these examples that counts its reads."""

    def __init__(self) -> None:
        self.num_reads = 0

    def __len__(self) -> int:
        return len(Y)

    def __getitem__(self, index: int) -> Any:
        self.num_reads += 1
        return X[index], int(Y[index])


def from_dataset(dataset: Any) -> fl.FederatedData:
    test = TensorDataset(torch.from_numpy(X[:30]), torch.from_numpy(Y[:30]))
    return fl.from_dataset(dataset, groups=NAMES[OWNERS], partition=fl.Natural(), test=test, seed=0)


@pytest.mark.parametrize("make", [natural, lambda: from_dataset(Unread())])
def test_figures_are_those_of_plain_arithmetic(make: Any) -> None:
    """Sizes, labels, distances, entropies and the Gini coefficient, client by client."""
    found = make().inspect()
    assert found.counts is not None
    own = [Y[np.sort(NAMES)[place] == NAMES[OWNERS]] for place in range(6)]
    assert found.sizes_C.tolist() == list(map(len, own))
    expected = np.stack([np.bincount(each, minlength=5) for each in own])
    assert found.counts.toarray().tolist() == expected.tolist()
    shares, pooled = expected / expected.sum(1, keepdims=True), np.bincount(Y) / 300
    assert np.allclose(found.distances_n, 0.5 * np.abs(shares - pooled).sum(1))
    assert np.allclose(found.entropies_n, -(shares * np.log2(shares)).sum(1))
    differences = np.abs(np.subtract.outer(found.sizes_C, found.sizes_C)).mean()
    assert found.gini == pytest.approx(differences / 2 / found.sizes_C.mean())
    assert found.ranges[0].low == X.min()


def test_the_distance_by_chance_is_that_of_random_clients() -> None:
    """Virtual clients draw at random, so they are as far from the pooled labels as by chance."""
    clients = fl.Bootstrap(num_clients=1_000_000, examples_per_client=7)
    data = fl.from_arrays(X, Y, partition=clients, test=(X, Y), seed=0)
    found = data.inspect(max_clients=4000)
    assert len(found.client_ids) == 4000
    assert float(found.distances_n.mean()) == pytest.approx(found.chance_distance, rel=0.02)
    assert found.gini < 1e-9
    two = fl.from_arrays(X[:2], [0, 1], partition=fl.Iid(2), test=(X[:2], [0, 1]), seed=0)
    assert two.inspect().chance_distance == pytest.approx(0.5)
    assert two.inspect().distances_n.tolist() == [0.5, 0.5]


def test_one_client_of_one_class_has_no_skew() -> None:
    """The extremes of all figures."""
    zeros = np.zeros(9, int)
    found = fl.from_arrays(X[:9], zeros, partition=fl.Iid(1), test=(X[:9], zeros), seed=0).inspect()
    figures = found.figures()
    assert [figures[key] for key in ("gini", "mean_distance", "chance_distance")] == [0, 0, 0]
    assert figures["mean_entropy"] == figures["pooled_entropy"] == 0


def test_sequences_of_labels_count_by_token_and_leave_out_ignored_ones() -> None:
    """As next characters of a text, some of which are padding."""
    tokens = np.array([[0, 1, IGNORED], [2, 2, 2], [IGNORED] * 3, [1, 1, 0]])
    words = tokens.clip(0)
    data = fl.from_arrays(
        words, tokens, groups=[0, 1, 2, 2], partition=fl.Natural(), test=(words, tokens), seed=0
    )
    found = data.inspect()
    assert found.counts is not None
    assert found.counts.toarray().tolist() == [[1, 1, 0], [0, 0, 3], [1, 2, 0]]
    assert found.num_labels_n.tolist() == [2, 1, 2]


def test_numbers_to_regress_on_have_a_range_by_client(tmp_path: Path) -> None:
    """Without classes: sizes, values, a table and a picture."""
    data = natural(X[:, 0])
    found = data.inspect()
    assert found.counts is None
    assert found.label_values is not None
    own = X[np.sort(NAMES)[2] == NAMES[OWNERS], 0]
    assert found.label_values[2] == pytest.approx([own.min(), own.mean(), own.max()])
    text = render_inspection(found)
    assert "label min" in text
    assert "label skew" not in text
    assert size_of(fl.draw_clients(data, tmp_path / "values.png")) == (1560, 1040)


def test_names_neither_control_a_terminal_nor_a_page(tmp_path: Path) -> None:
    """In the table, in a notebook and in the picture."""
    data = natural()
    text, page = render_inspection(data.inspect()), data._repr_html_()
    assert "\x1b" not in text + page
    assert "Ünna, <b>" in text
    assert "<script>" not in page
    assert "&lt;script&gt;" in page
    assert fl.draw_clients(data, tmp_path / "names.png").stat().st_size > 10_000


def test_names_of_classes_are_shown_for_their_numbers(tmp_path: Path) -> None:
    """String labels have names, which a page escapes."""
    words = np.array(["<b>ill</b>", "well", "$a$"])[Y % 3]
    data = natural(words)
    text = render_inspection(data.inspect())
    assert all(each in text for each in ("<b>ill</b>", "well", "$a$"))
    assert "<b>" not in data._repr_html_()
    assert "well: " in data._repr_html_()
    assert data.inspect().figures()["class_names"] == ("$a$", "<b>ill</b>", "well")
    fl.draw_clients(data, tmp_path / "names.png")


def test_a_notebook_shows_a_summary_without_reading_a_dataset() -> None:
    """Examples in memory are counted; a dataset is not read, and its sizes are known."""
    assert natural()._repr_html_().count("<rect") == 30
    dataset = Unread()
    data = from_dataset(dataset)
    before = dataset.num_reads
    page = data._repr_html_()
    assert dataset.num_reads == before
    assert "300; a client" in page
    assert "label skew" not in page
    virtual = fl.Bootstrap(num_clients=3_000_000, examples_per_client=2)
    many = fl.from_arrays(X, Y, partition=virtual, test=(X, Y), seed=0)
    assert len(many._repr_html_()) < 40_000


def test_many_clients_are_summarized(tmp_path: Path) -> None:
    """The largest and the smallest; the picture has neighbors averaged."""
    data = fl.from_arrays(
        np.repeat(X, 10, axis=0),
        np.arange(3000) % 100,
        partition=fl.LognormalSizes(700, 1.5, 1),
        test=(X, np.arange(300) % 100),
        seed=0,
    )
    text = render_inspection(data.inspect())
    assert "the 8 largest and the 8 smallest of 700 clients" in text
    assert "most frequent" in text
    assert len(text.splitlines()) < 30
    fl.draw_clients(data, tmp_path / "many.png")
    few = fl.from_arrays(
        X, np.arange(300) % 100, partition=fl.Iid(4), test=(X, np.arange(300) % 100), seed=0
    )
    fl.draw_clients(few, tmp_path / "labels.png")


def test_shifts_and_own_tests_are_listed() -> None:
    """A column each."""
    data = natural().with_client_tests([(X[:2], Y[:2])] * 6)
    text = render_inspection(data.with_feature_shift(fl.NoiseShift(std=0.5), seed=0).inspect())
    assert re.search(r"own tests +a client 2\n", text)
    assert text.splitlines()[-1].endswith("noise 0.5")


def test_the_command_prints_a_table_and_json_and_draws(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A line for each client, then the summary, both of the configured clients."""
    few = ["--set", 'data.partition={kind="few_classes", num_clients=20, classes_per_client=2}']
    picture = tmp_path / "clients.png"
    assert main(["data", "inspect", *few, "--picture", str(picture)]) == 0
    assert "a client 2\n" in capsys.readouterr().out
    assert size_of(picture) == (1560, 1040)
    assert main(["data", "inspect", *few, "--json", "--max-clients", "5"]) == 0
    *clients, summary = map(json.loads, capsys.readouterr().out.splitlines())
    assert len(clients) == 5
    assert all(len(each["labels"]) == 2 for each in clients)
    assert sum(clients[0]["labels"].values()) == clients[0]["num_examples"]
    assert summary["num_clients"] == 20
    assert summary["labels_per_client"]["max"] == 2
    assert main(["data", "inspect", "--set", "data.source=none"]) == 2
