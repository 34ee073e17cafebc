"""What the documentation shows works, and what it lists is complete."""

import importlib.util
import json
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, closing
from dataclasses import fields
from pathlib import Path
from textwrap import dedent
from types import ModuleType
from typing import Any, get_args

import pytest
import torch
import typer

import fedlearn
from fedlearn.cli.app import app, main
from fedlearn.config import ClientConfig, Config, Section, load, load_client, load_service
from fedlearn.config.aggregation import AGGREGATIONS
from fedlearn.config.attack import ATTACKS
from fedlearn.config.cohort import COHORTS
from fedlearn.config.compression import COMPRESSIONS
from fedlearn.config.section import OneOf
from fedlearn.config.sweep import load_sweep
from fedlearn.config.training import ALGORITHMS
from fedlearn.core.clock import VirtualClock
from fedlearn.core.codec import decode, encode
from fedlearn.core.kinds import DISTILLATION
from fedlearn.core.messages import (
    ClientId,
    EvaluateReply,
    EvaluateRequest,
    TrainReply,
    TrainRequest,
)
from fedlearn.deployment.live_status import LiveStatus
from fedlearn.errors import ConfigError
from fedlearn.gateway.counters import GatewayCounters
from fedlearn.gateway.meanings import MEANINGS
from fedlearn.gateway.pace import Pace
from fedlearn.identity.audit import Action
from fedlearn.identity.bundle_folder import read_description
from fedlearn.identity.roles import PERMISSIONS, Role
from fedlearn.parallel.task import Progress
from fedlearn.secagg.draw import find_max_accomplices
from fedlearn.secagg.fixed_point import Lane
from fedlearn.secagg.graph import Topology
from fedlearn.secagg.messages import Down, Up
from fedlearn.secagg.parameters import (
    GRINDING_BITS,
    Adversary,
    Assumptions,
    Parameters,
    derive,
    num_corrupted,
)
from fedlearn.secagg.session import Stage
from fedlearn.secagg.terms import Terms
from fedlearn.session.session import ClientSession
from fedlearn.transport import wire_pb2
from tests.addresses import free_addresses
from tests.processes import Launcher, Process

ROOT = Path(__file__).parents[2]
PAGES = sorted(
    path
    for path in [
        *ROOT.glob("*.md"),
        *ROOT.glob("docs/**/*.md"),
        *ROOT.glob("simulations/**/*.md"),
        *ROOT.glob("clients/**/*.md"),
        *ROOT.glob("server/**/*.md"),
    ]
    if "_build" not in path.parts
)
GUIDES = ROOT / "docs" / "how-to"
SHELLS = ("shell", "bash")
METRIC = re.compile(r"\bfedlearn_[a-z_]+\b")
MEASURED = ("accuracy", "loss", "clients/accuracy_mean", "clients/loss_mean")
COMMANDS = typer.main.get_command(app)


def blocks(page: str, language: str) -> list[str]:
    """Return the fenced blocks in one language; those in lists lose their indentation."""
    fenced = rf"^(?P<indent> *)```{language}\n(.*?)^(?P=indent)```$"
    return [dedent(found[2]) for found in re.finditer(fenced, page, re.MULTILINE | re.DOTALL)]


def commands_in(page: str) -> Iterator[str]:
    """Yield every fedlearn command of a page, in shell blocks and within sentences.

    In a block, a command may follow whatever runs it: variables, ``sudo``, ``docker exec``.
    """
    for block in (each for name in SHELLS for each in blocks(page, name)):
        for line in re.split(r"\n|&&|;(?=\s)", block.replace("\\\n", " ")):
            found = re.search(r"^[^#]*?(?<![\w-])(fedlearn ([a-z]|--help|--version).*)", line)
            if found is not None:
                yield found[1].strip()
    for text in re.findall(r"`(fedlearn [a-z]+\s[^`]*)`", page):
        yield " ".join(text.split())


def commands() -> Iterator[tuple[str, str]]:
    """Yield the page and text of every fedlearn command."""
    for path in PAGES:
        for text in commands_in(path.read_text()):
            yield str(path.relative_to(ROOT)), text


def parse(text: str) -> None:
    """Parse a command as the shell and the command line would, without running it.

    Raises:
        Exception: From click, if the arguments are wrong.
    """
    words = shlex.split(text, comments=True)[1:]
    end = next((place for place, word in enumerate(words) if word in (">", "|", "&")), len(words))
    group = COMMANDS
    assert isinstance(group, typer.core.TyperGroup)
    with group.make_context("fedlearn", words[:end]) as root:
        name, command, rest = group.resolve_command(root, [*root._protected_args, *root.args])  # noqa: SLF001 (click offers no other way to them)
        assert command is not None, name
        command.make_context(name, list(rest), parent=root)


@pytest.fixture(scope="module")
def from_code() -> ModuleType:
    """The Sphinx extension that generates the reference pages."""
    pytest.importorskip("sphinx")
    path = ROOT / "docs" / "extensions" / "from_code.py"
    spec = importlib.util.spec_from_file_location("from_code", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.slow
def test_the_python_example_of_the_readme_is_short_and_runs(
    launcher: Launcher, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It has at most 15 lines and, in its own process and folder, reaches the stated accuracy."""
    page = (ROOT / "README.md").read_text()
    found = blocks(page, "python")
    (example,) = [block for block in found if "num_rounds=20" in block]
    assert len([line for line in example.splitlines() if line.strip()]) <= 15
    (tmp_path / "example.py").write_text(example)
    monkeypatch.chdir(tmp_path)
    done = launcher.run(tmp_path / "example.py", environ={"HOME": str(tmp_path)})
    assert done.returncode == 0, done.stderr
    told = re.search(r"prints an accuracy of (0\.\d+)", page)
    printed = re.search(r"'accuracy': (0\.\d+)", done.stdout)
    assert told is not None
    assert printed is not None
    # Other processors round differently.
    assert float(printed[1]) == pytest.approx(float(told[1]), abs=0.02)
    assert list(tmp_path.glob("runs/*/curves.png"))
    assert list(tmp_path.glob("runs/*/report.html"))


def write_blocks(page: Path, folder: Path) -> None:
    """Write a page's blocks that start with a comment of a file name to those files."""
    text = page.read_text()
    for block in [*blocks(text, "python"), *blocks(text, "toml")]:
        name = re.match(r"# (\w+\.\w+)\n", block)
        if name is not None:
            (folder / name[1]).write_text(block)


@pytest.mark.slow
def test_the_example_of_an_application_passes_its_own_test(tmp_path: Path) -> None:
    """The guides' trainer, agent and tests become files, and the agent trains for a real server."""
    write_blocks(GUIDES / "embed-the-client.md", tmp_path)
    write_blocks(GUIDES / "test-the-client.md", tmp_path)
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q"],
        cwd=tmp_path,
        env={"PYTHONPATH": str(ROOT), "HOME": str(tmp_path)},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stdout
    assert "2 passed" in done.stdout


def test_a_trainer_of_the_guide_that_is_no_torch_module_answers() -> None:
    """In a session, as for a coordinator."""
    page = (GUIDES / "own-trainer.md").read_text()
    (source,) = [block for block in blocks(page, "python") if "class MeanTrainer" in block]
    names: dict[str, Any] = {}  # Any: defined by the example
    exec(source, names)  # noqa: S102 (our own page)
    session = ClientSession(ClientId(0), names["MeanTrainer"]())
    asked = TrainRequest(
        round_num=0,
        attempt=0,
        tensors={"mean": torch.zeros(())},
        order=("mean",),
        settings={},
        seed=0,
    )
    reply, _ = session.handle(encode(asked), b"")
    trained = decode(reply)
    assert isinstance(trained, TrainReply)
    assert trained.lanes["delta"].tolist() == [1.5]
    measured, _ = session.handle(encode(EvaluateRequest(round_num=1, tensors=asked.tensors)), b"")
    evaluated = decode(measured)
    assert isinstance(evaluated, EvaluateReply)
    assert evaluated.num_examples == 3


def test_the_guide_to_sweeps_compares(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Its file is valid, and its experiment runs."""
    page = (GUIDES / "compare-over-seeds.md").read_text()
    (file,) = blocks(page, "toml")
    (tmp_path / "sweep.toml").write_text(file)
    assert set(load_sweep(tmp_path / "sweep.toml").variants) == {"FedAvg", "FedProx"}
    source, _ = blocks(page, "python")
    names: dict[str, Any] = {"__name__": "guide"}  # Any: defined by the example
    exec(source, names)  # noqa: S102 (our own page)
    grid: dict[str, list[object]] = {"method": ["FedAvg", "FedProx"], "cohort.num_wanted": [3]}
    results = fedlearn.sweep(names["experiment"], grid, 1, name="s", jobs=1, runs_dir=tmp_path)
    assert len(results.values("accuracy")) == 2
    assert "2/2 method=FedProx, cohort.num_wanted=3, seed 0: done" in capsys.readouterr().out


@pytest.mark.slow
def test_the_guide_to_lora_trains_adapters_only(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its accuracies are those that it tells, and the pretrained model stays as it was."""
    example, save, only_b, personal = blocks(
        (GUIDES / "fine-tune-with-lora.md").read_text(), "python"
    )
    monkeypatch.chdir(tmp_path)
    names: dict[str, Any] = {"__name__": "guide"}  # Any: defined by the example
    exec(example, names)  # noqa: S102 (our own page)
    accuracies = [each.metrics["accuracy"] for each in names["run"].history]
    assert (round(accuracies[0], 2), round(accuracies[-1], 2)) == (0.5, 0.85)
    trained, inputs = names["run"].load_model(), torch.tensor(names["x"], dtype=torch.float32)
    for name, value in names["pretrained"].items():
        layer, kind = name.split(".")
        kept = trained.state_dict()[f"base_model.model.{layer}.base_layer.{kind}"]
        torch.testing.assert_close(kept, value, rtol=0.0, atol=0.0)
    exec(save, names)  # noqa: S102 (likewise)
    torch.testing.assert_close(names["whole"](inputs), trained(inputs))
    assert (tmp_path / "adapter" / "adapter_model.safetensors").stat().st_size < 20_000
    exec(only_b, names)  # noqa: S102 (likewise)
    model = names["make_model_with_frozen_a"]()
    sent = [name for name, each in model.named_parameters() if each.requires_grad]
    assert [name.split(".")[3] for name in sent] == ["lora_B", "lora_B"]
    exec(personal.replace("num_rounds=20", "num_rounds=4"), names)  # noqa: S102 (likewise)
    metrics = names["run"].history[-1].metrics
    assert metrics["clients/personal_accuracy_mean"] > metrics["accuracy"] + 0.2


def test_the_guide_to_sweeps_searches(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its search with Optuna: trials report each round, and some are pruned."""
    optuna = pytest.importorskip("optuna", reason="needs pip install fedlearn[optuna]")
    optuna.logging.set_verbosity(optuna.logging.ERROR)
    source, search = blocks((GUIDES / "compare-over-seeds.md").read_text(), "python")
    assert len([line for line in search.splitlines() if line.strip()]) <= 17
    monkeypatch.chdir(tmp_path)
    names: dict[str, Any] = {"__name__": "guide"}  # Any: defined by the example
    exec(source, names)  # noqa: S102 (our own page)
    exec(search.replace("n_trials=20", "n_trials=8"), names)  # noqa: S102 (likewise)
    trials = names["study"].trials
    states = {each.state.name for each in trials}
    assert states <= {"COMPLETE", "PRUNED"}
    assert all(
        len(each.intermediate_values) == 5 for each in trials if each.state.name == "COMPLETE"
    )


@pytest.mark.slow
def test_the_guide_leads_from_nothing_to_the_last_round(launcher: Launcher, tmp_path: Path) -> None:
    """The guide's configuration, trainer and commands, with two clients on free ports."""
    write_blocks(GUIDES / "deploy-a-coordinator.md", tmp_path)
    gateway, http = free_addresses(2)
    file = tmp_path / "coordinator.toml"
    file.write_text(
        f'{file.read_text()}\n[coordinator]\naddress = "{gateway}"\nhttp_address = "{http}"\n'
    )

    def type_in(name: str, *arguments: str, **variables: str) -> Process:
        """Start a command in the folder, without this environment's variables for paths."""
        environ = {"HOME": str(tmp_path), **variables}
        return stack.enter_context(
            closing(launcher.launch(tmp_path / name, *arguments, environ=environ))
        )

    with ExitStack() as stack:
        for name in ("clinic-a", "clinic-b"):
            assert type_in(f"invite-{name}", "invite", name).wait() == 0
        coordinator = type_in("coordinator-process", "coordinator")
        for part, name in enumerate(("clinic-a", "clinic-b")):
            join = ("join", f"{name}.invitation", "--task", "trainer.py:make_trainer")
            type_in(f"join-{name}", *join, "--home", name, PART=str(part))
        assert coordinator.wait() == 0, coordinator.tail()
        assert "clinics done after 5/5 rounds" in coordinator.out() + coordinator.err()


def cells(page: str) -> list[str]:
    """Return the cells of a page's tables, without the targets of links."""
    rows = [line for line in page.splitlines() if line.startswith("|") and "---" not in line]
    return [
        re.sub(r"\]\([^)]*\)", "]", cell) for row in rows for cell in row.strip("|").split(" | ")
    ]


def test_the_readme_is_short() -> None:
    """Newcomers read at most 700 words, and 12 in a table's cell."""
    page = (ROOT / "README.md").read_text()
    assert len(page.split()) <= 700
    assert max(len(cell.split()) for cell in cells(page)) <= 12


@pytest.mark.parametrize(
    "page", sorted(ROOT.glob("docs/explanation/*.md")), ids=lambda page: page.stem
)
def test_a_page_of_explanation_is_read_in_one_sitting(page: Path) -> None:
    """At most 1,500 words."""
    assert len(page.read_text().split()) <= 1500


@pytest.mark.parametrize(("page", "text"), sorted(set(commands())))
def test_commands_of_the_documentation_parse(page: str, text: str) -> None:
    """Command, arguments and options exist."""
    parse(text)


def test_commands_are_found_wherever_a_page_has_them() -> None:
    """The control of the tests below: after what runs them, in lists and in sentences."""
    page = """Type `fedlearn show
RUN`, or just `fedlearn runs`.

- In a list:

  ```shell
  # fedlearn is installed by now
  useradd --shell /usr/sbin/nologin fedlearn
  PART=0 fedlearn join a.invitation --task t.py:T && fedlearn runs   # all of them
  sudo -u fedlearn /opt/bin/fedlearn invite a \\
      --tag k=v
  ```
"""
    found = [shlex.split(text, comments=True)[1:] for text in commands_in(page)]
    assert found == [
        ["join", "a.invitation", "--task", "t.py:T"],
        ["runs"],
        ["invite", "a", "--tag", "k=v"],
        ["show", "RUN"],
    ]


def test_commands_that_are_only_named_exist() -> None:
    """Within a sentence they have no arguments."""
    assert isinstance(COMMANDS, typer.core.TyperGroup)
    named = {name for path in PAGES for name in re.findall(r"`fedlearn (\w+)`", path.read_text())}
    assert {"simulate", "coordinator", "join"} <= named
    assert named <= COMMANDS.commands.keys()


@pytest.mark.parametrize(
    "text",
    [
        "fedlearn simulte",
        "fedlearn simulate --round 3",
        "fedlearn show",
        "fedlearn runs x",
        "fedlearn join",
    ],
)
def test_commands_that_do_not_exist_do_not_parse(text: str) -> None:
    """The control of the test above."""
    with pytest.raises(Exception, match=r"(?i)no such|missing|unexpected"):
        parse(text)


@pytest.mark.parametrize(("page", "text"), sorted(set(commands())))
def test_overrides_of_the_documentation_are_valid(page: str, text: str) -> None:
    """Each ``--set`` names an existing key and a valid value."""
    words = shlex.split(text, comments=True)
    overrides = [words[place + 1] for place, word in enumerate(words) if word == "--set"]
    load(None, overrides=overrides)


def write_hospitals(folder: Path) -> None:
    """Write the files of the guide to statistics, which it shows side by side."""
    page = (GUIDES / "federated-statistics.md").read_text()
    lines = blocks(page, "text")[0].splitlines()
    for names, *rows in ([line[:32].strip() for line in lines], [line[32:] for line in lines]):
        path = folder / names
        path.parent.mkdir(exist_ok=True)
        path.write_text("\n".join(each for each in rows if each))


def test_the_guide_to_statistics_shows_what_its_plan_prints(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """From its files and its plan."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("FEDLEARN_STORE_URL", raising=False)
    monkeypatch.delenv("FEDLEARN_RUNS_DIR", raising=False)
    page = (GUIDES / "federated-statistics.md").read_text()
    write_hospitals(tmp_path)
    (tmp_path / "plan.toml").write_text(blocks(page, "toml")[0])
    (command,) = [each for each in commands_in(page) if "statistics plan.toml" in each]
    assert main(shlex.split(command)[1:]) == 0
    printed = [line.rstrip() for line in capsys.readouterr().out.splitlines()]
    assert printed == blocks(page, "text")[1].splitlines()


def test_toml_of_the_documentation_loads(tmp_path: Path) -> None:
    """Every TOML block is part of a configuration, whose kind its first line may say."""
    write_hospitals(tmp_path)
    found = [(path, text) for path in PAGES for text in blocks(path.read_text(), "toml")]
    assert found
    for path, text in found:
        experiment = tmp_path / path.with_suffix(".toml").name
        experiment.write_text(text)
        name = text.partition("\n")[0]
        if name == "# client.toml" or "\n[policy" in text:
            load_client(experiment)
        elif name == "# service.toml":
            load_service(experiment)
        elif name == "# sweep.toml":
            load_sweep(experiment)
        elif name.endswith("bundle.toml"):
            read_description(experiment)
        else:
            load(experiment, overrides=())


def test_python_of_the_documentation_compiles() -> None:
    """Every Python block compiles."""
    for path in PAGES:
        for text in blocks(path.read_text(), "python"):
            compile(text, str(path), "exec")


def test_links_between_pages_lead_to_files() -> None:
    """All relative links of pages, without their anchors."""
    broken = [
        (str(path.relative_to(ROOT)), target)
        for path in PAGES
        for target in re.findall(r"\]\(([^)#:]+)\)", path.read_text())
        if not (path.parent / target).exists()
    ]
    assert broken == []


def keys_of(schema: dict[str, Any], document: dict[str, Any], path: str = "") -> Iterator[str]:
    """Yield every dotted key in a JSON schema, in tables of all kinds."""
    if "$ref" in schema:
        yield from keys_of(document["$defs"][schema["$ref"].rpartition("/")[2]], document, path)
    for option in [*schema.get("oneOf", ()), *schema.get("anyOf", ())]:
        yield from keys_of(option, document, path)
    for name, inner in schema.get("properties", {}).items():
        if "$ref" in (named := inner.get("additionalProperties") or {}):
            yield f"{path}{name}.NAME"
            yield from keys_of(named, document, f"{path}{name}.NAME.")
            continue
        yield f"{path}{name}"
        yield from keys_of(inner, document, f"{path}{name}.")


@pytest.mark.parametrize("tree", [Config, ClientConfig])
def test_the_configuration_reference_has_every_key(
    from_code: ModuleType, tree: type[Section]
) -> None:
    """Keys of the JSON schema appear as a row, as a table, or as a table's kind."""
    listed = set()
    for table in from_code.configuration_tables(tree):
        prefix = f"{table.path}." if table.path else ""
        kind = {table.kind.partition(" = ")[0]} if table.kind else set()
        listed |= {table.path} | {f"{prefix}{name}" for name in kind}
        listed |= {f"{prefix}{key.name}" for key in table.keys}
        assert all(key.description and key.type and key.default for key in table.keys)
    document = tree.model_json_schema()
    assert set(keys_of(document, document)) == listed - {""}


def test_the_configuration_reference_tells_which_defaults_depend_on_the_data(
    from_code: ModuleType,
) -> None:
    """Found by comparing with a tree for other data; no other key depends on the data."""
    tables = list(from_code.configuration_tables(Config))
    found = {
        (f"{table.path}.{key.name}", key.default)
        for table in tables
        for key in table.keys
        if "other data" in key.default
    }
    other = "; with other data than the digits: "
    assert found == {
        ("cohort.num_wanted", f'10{other}"auto"'),
        ("stragglers.over_selection", f"1.3{other}1.0"),
        ("stragglers.deadline_s", f'10.0{other}"auto"'),
    }
    devices = {table.kind: table.when_default for table in tables if table.path == "devices"}
    assert devices == {
        'kind = "ideal"': "The default with other data than the digits.",
        'kind = "lognormal"': "The default with the digits.",
        'kind = "python"': "",
    }


def test_the_reference_shows_the_help_of_every_command(from_code: ModuleType) -> None:
    """For the program and all its subcommands, also those in groups."""
    assert isinstance(COMMANDS, typer.core.TyperGroup)
    expected = {"fedlearn"} | {f"fedlearn {name}" for name in COMMANDS.commands}
    for name, command in COMMANDS.commands.items():
        expected |= {f"fedlearn {name} {inner}" for inner in getattr(command, "commands", ())}
    assert "fedlearn data inspect" in expected
    helps = from_code.command_helps()
    assert set(helps) == expected
    assert all(text.startswith("Usage: fedlearn") for text in helps.values())


def test_the_wire_reference_has_every_message_and_field() -> None:
    """Each message has a section with all its fields and their values."""
    names = ("wire.md", "wire-messages.md")
    page = "".join((ROOT / "docs" / "reference" / name).read_text() for name in names)
    sections = dict(re.findall(r"^### `(\w+)`\n(.*?)(?=^##)", page, re.MULTILINE | re.DOTALL))
    messages = wire_pb2.DESCRIPTOR.message_types_by_name
    assert sections.keys() == set(messages)
    for name, message in messages.items():
        values = [value for enum in message.enum_types for value in enum.values_by_name]
        for word in [*message.fields_by_name, *values]:
            assert f"`{word}`" in sections[name], f"{name}.{word}"
    for service in wire_pb2.DESCRIPTOR.services_by_name.values():
        assert all(f"`{service.name}.{each}`" in page for each in service.methods_by_name)


def test_the_protocol_reference_of_secure_aggregation_has_every_field() -> None:
    """Of each message, of the terms and their lanes; and all stages."""
    page = (ROOT / "docs" / "reference" / "secure-aggregation.md").read_text()
    sections = dict(re.findall(r"^### `(\w+)`\n(.*?)(?=^##)", page, re.MULTILINE | re.DOTALL))
    kinds = [*get_args(Down), *get_args(Up), Terms, Lane]
    assert sections.keys() == {kind.__name__ for kind in kinds}
    for kind in kinds:
        for each in fields(kind):
            assert f"`{each.name}`" in sections[kind.__name__], f"{kind.__name__}.{each.name}"
    stages = re.findall(r"^\| R\d (\w+) \|", page, re.MULTILINE)
    assert stages == [str(stage) for stage in Stage]


def test_the_guide_to_secure_aggregation_shows_what_is_derived() -> None:
    """Its tables agree with the code."""
    page = (GUIDES / "aggregate-securely.md").read_text()
    cell = r"(none|\d+, \d+) \|"
    sparse = re.findall(rf"^\| ([\d,]+) \|[^|]*\| {' '.join([cell] * 4)}$", page, re.MULTILINE)
    assert len(sparse) == 4
    for n, *told in sparse:
        cases = [(who, dropout) for who in reversed(Adversary) for dropout in (0.1, 0.3)]
        assert told == [_sparse(int(n.replace(",", "")), *each) for each in cases]
    complete = re.findall(
        r"^\| (\d+) \| (\d+), (\d+) \| (\d+), (\d+) \| (\d+), (\d+) \|$",
        page,
        re.MULTILINE,
    )
    assert len(complete) == 5
    assumed = ((0.1, 0.3), (0.2, 0.3), (1 / 3, 0.1))
    for n, *numbers in complete:
        found = [_derive(int(n), Topology.COMPLETE, *each) for each in assumed]
        least = [number for each in found for number in (each.threshold, each.min_survivors)]
        assert least == [int(number) for number in numbers]


def test_the_explanation_of_drawn_cohorts_shows_what_they_stand() -> None:
    """Its table agrees with the computation, for two clients drawn per client asked."""
    page = (ROOT / "docs" / "explanation" / "secure-aggregation-proofs.md").read_text()
    row_of_five = r"^" + r"\| ([\d,]+) " * 5 + r"\|$"
    rows = re.findall(row_of_five, page, re.MULTILINE)
    assert len(rows) == 5
    for row in rows:
        listed, asked, *told = (int(each.replace(",", "")) for each in row)
        chance, most = min(1.0, 2.0 * asked / listed), num_corrupted(asked, corruption=0.1)
        stands = [
            find_max_accomplices(listed, chance=chance, num_corrupted=most, log2_risk=-42.0 - tries)
            for tries in (0, GRINDING_BITS)
        ]
        assert told == [most, *stands]


def _sparse(n: int, adversary: Adversary, dropout: float) -> str:
    try:
        found = _derive(n, Topology.SPARSE, 0.1, dropout, adversary=adversary)
    except ConfigError:
        return "none"
    return f"{found.num_neighbors}, {found.threshold}"


def _derive(
    n: int,
    topology: Topology,
    corruption: float,
    dropout: float,
    *,
    adversary: Adversary = Adversary.ACTIVE_SERVER,
) -> Parameters:
    assumptions = Assumptions(
        adversary=adversary,
        topology=topology,
        corruption=corruption,
        dropout=dropout,
        sigma_bits=40,
        eta_bits=30,
    )
    return derive(n, assumptions=assumptions)


def test_the_metrics_reference_is_what_a_coordinator_says() -> None:
    """Names from status, gateway and coordinator; the guides use no others."""
    measured = dict.fromkeys(MEASURED, 0.5)
    live_status = LiveStatus(
        metrics=measured,
        epsilon=1.0,
        epsilon_budget=2.0,
        staleness={0: 1},
        in_flight_limit=4,
        secure_dropouts=dict.fromkeys(Stage, 0),
    )
    live_status.record_training(
        DISTILLATION,
        Progress(
            step_num=1,
            num_steps=2,
            loss=0.5,
            examples_per_s=10.0,
            learning_rate=0.1,
            loss_scale=1.0,
            num_skipped=0,
        ),
    )
    of_coordinator = {"build_info", "certificate_days", "disk_free_bytes", "lease_held", "ready"}
    of_service = {"runs_at_work", "runs_queued"}
    pace = Pace(VirtualClock(), share=0.5)
    pace.record_cost(cpu_s=0.1, num_check_ins=10)
    of_gateway = {"asked", "connected", "eligible", "elsewhere", "set_aside", *pace.values()}
    kinds = {
        "gauge": {*live_status.gauges(), *of_coordinator, *of_gateway, *of_service},
        "counter": {*live_status.counters(), *GatewayCounters().values(), "refused"},
        "histogram": {*live_status.histograms(), *GatewayCounters().histograms()},
    }
    said = {_metric(name): kind for kind, names in kinds.items() for name in names}
    assert said == {name: meaning.kind for name, meaning in MEANINGS.items()}
    reference = (ROOT / "docs" / "reference" / "metrics.md").read_text()
    rows = re.findall(r"^\| `(fedlearn_\w+)` \| (.+) \| (.+) \| (.+) \|$", reference, re.MULTILINE)
    assert rows == [(_full(name), *meaning) for name, meaning in MEANINGS.items()]
    names = {_full(name) for name in MEANINGS}
    assert set(METRIC.findall(reference)) - {"fedlearn_"} == names
    guides = ("watch-a-deployment.md", "monitor-a-coordinator.md")
    used = {each for guide in guides for each in METRIC.findall((GUIDES / guide).read_text())}
    assert {re.sub(r"_(bucket|sum|count)$", "", name) for name in used} <= names


def _metric(name: str) -> str:
    return name.partition("{")[0].replace("/", "_")


def _full(name: str) -> str:
    return f"fedlearn_{name}" + ("_total" if MEANINGS[name].kind == "counter" else "")


def test_every_public_name_stands_in_the_python_reference() -> None:
    """Its module is documented, and the page does not exclude the name."""
    page = (ROOT / "docs" / "reference" / "python.md").read_text()
    for name in fedlearn.__all__:
        value = getattr(fedlearn, name)
        found = re.search(
            rf"automodule:: {re.escape(value.__module__)}\n(   :members: (?P<only>.*)\n)?", page
        )
        assert found is not None, name
        assert found["only"] is None or name in found["only"].split(", "), name


def test_the_digits_experiment_spells_out_the_main_job() -> None:
    """So ``fedlearn simulate`` and the file are the same experiment."""
    experiment = load(ROOT / "simulations" / "digits" / "experiment.toml", overrides=())
    main_job = Config()
    # The file may have a number where the default is a rule, so the policies are compared.
    assert experiment.straggler_policy() == main_job.straggler_policy()
    assert experiment.model_copy(update={"stragglers": main_job.stragglers}) == main_job


def test_each_experiment_ships_its_figures() -> None:
    """A README, and the expected results of a short run."""
    for experiment in ROOT.glob("simulations/*/experiment.toml"):
        assert (experiment.parent / "README.md").exists(), experiment
        assert (experiment.parent / "expected.json").exists(), experiment


def test_each_claim_can_be_run() -> None:
    """Its overrides fit its experiment, and published values are of figures that it compares."""
    for path in ROOT.glob("simulations/*/claim.json"):
        claim = json.loads(path.read_text())
        for name, run in claim["runs"].items():
            for overrides in (run["overrides"], [*run["overrides"], *claim["short"]]):
                load(path.parent / "experiment.toml", overrides=overrides)
            assert run.get("published", {}).keys() <= claim["figures"].keys(), (path, name)


@pytest.mark.parametrize("table", [ALGORITHMS, AGGREGATIONS, COHORTS, COMPRESSIONS, ATTACKS])
def test_each_component_is_found_from_the_page_that_helps_to_choose(table: OneOf[Any]) -> None:
    """By its names in a configuration and in Python, there or in a guide to which it links."""
    page = (GUIDES / "choose-an-algorithm.md").read_text()
    linked = [GUIDES / name for name in re.findall(r"\]\(([a-z-]+\.md)", page)]
    text = page + "".join(each.read_text() for each in linked)
    for section in table.members:
        name, call = section.model_fields[table.tag].default, section.make.__name__
        # "own" and "none" are no choice; "python" is for a component of the user's.
        if name in {"own", "none", "python"}:
            continue
        assert re.search(rf"`\"?{name}\"?`", text), f"{table.tag} = {name!r}"
        assert call not in fedlearn.__all__ or re.search(rf"fl\.{call}\b", text), call


def test_each_bound_of_an_algorithm_stands_where_protection_is_explained() -> None:
    page = (GUIDES / "choose-an-algorithm.md").read_text()
    (listed,) = re.findall(r"The bounds are (.*?)\. ", page)
    keys = {key for section in ALGORITHMS.members for key in section.model_fields}
    assert set(re.findall(r"`(\w+)`", listed)) == {key for key in keys if key.endswith("_bound")}


def test_every_action_of_the_audit_log_is_explained() -> None:
    """In the guide's table, except for the first entry, which the explanation describes."""
    page = (ROOT / "docs/how-to/audit-log.md").read_text()
    assert [each for each in Action if f"`{each}`" not in page] == [Action.LOG_STARTED]


def test_the_reference_of_roles_is_the_table_of_permissions() -> None:
    page = (ROOT / "docs" / "reference" / "roles.md").read_text()
    row = r"^\| `(.+)` \|" + 4 * r" (.+) \|" + r" (\w+) \|$"
    rows = re.findall(row, page, re.MULTILINE)
    assert rows == [
        (
            command.value,
            *("yes" if role in each.roles else "-" for role in Role),
            each.reach.name.lower(),
        )
        for command, each in PERMISSIONS.items()
    ]
