"""What the documentation shows works, and what it lists is all there is."""

import importlib.util
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import typer

import fedlearn
from fedlearn.cli.app import app
from fedlearn.config import Config, load

ROOT = Path(__file__).parents[2]
PAGES = sorted(
    path
    for path in [
        *ROOT.glob("*.md"),
        *ROOT.glob("docs/**/*.md"),
        *ROOT.glob("simulations/**/*.md"),
        *ROOT.glob("clients/*.md"),
        *ROOT.glob("server/*.md"),
    ]
    if "_build" not in path.parts
)
COMMANDS = typer.main.get_command(app)


def blocks(page: str, language: str) -> list[str]:
    """Return the fenced blocks of one language."""
    return re.findall(rf"^```{language}\n(.*?)^```$", page, re.MULTILINE | re.DOTALL)


def commands() -> Iterator[tuple[str, str]]:
    """Yield page and text of every fedlearn command in a shell block."""
    for path in PAGES:
        for block in blocks(path.read_text(), "shell"):
            for line in re.split(r"\n|&&|;", block.replace("\\\n", " ")):
                text = re.sub(r"(^.* -m )(?=fedlearn )", "", line.strip())
                if text.startswith("fedlearn "):
                    yield str(path.relative_to(ROOT)), text


def parse(text: str) -> None:
    """Parse a command as the shell and the command line would; run nothing.

    Raises:
        Exception: click's, where the arguments are wrong.
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
    """The Sphinx extension that writes the reference pages."""
    pytest.importorskip("sphinx")
    path = ROOT / "docs" / "extensions" / "from_code.py"
    spec = importlib.util.spec_from_file_location("from_code", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_python_example_of_the_readme_is_short_and_runs(tmp_path: Path) -> None:
    """At most 15 lines; in a process and folder of its own, as its reader runs it."""
    (example,) = blocks((ROOT / "README.md").read_text(), "python")
    assert len([line for line in example.splitlines() if line.strip()]) <= 15
    assert "num_rounds=20" in example
    (tmp_path / "example.py").write_text(example.replace("num_rounds=20", "num_rounds=2"))
    done = subprocess.run(
        [sys.executable, "example.py"],
        cwd=tmp_path,
        env={"PYTHONPATH": str(ROOT), "HOME": str(tmp_path)},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert "'accuracy': " in done.stdout
    assert list(tmp_path.glob("runs/*/curves.png"))
    assert list(tmp_path.glob("runs/*/report.html"))


def test_the_readme_is_short() -> None:
    """A newcomer reads it to the end."""
    assert len((ROOT / "README.md").read_text().splitlines()) < 150


@pytest.mark.parametrize(("page", "text"), sorted(set(commands())))
def test_commands_of_the_documentation_parse(page: str, text: str) -> None:
    """As typed: command, arguments and options exist."""
    parse(text)


@pytest.mark.parametrize(
    "text",
    ["fedlearn simulte", "fedlearn simulate --round 3", "fedlearn show", "fedlearn runs x"],
)
def test_commands_that_do_not_exist_do_not_parse(text: str) -> None:
    """The control of the test above."""
    with pytest.raises(Exception, match=r"(?i)no such|missing|unexpected"):
        parse(text)


@pytest.mark.parametrize(("page", "text"), sorted(set(commands())))
def test_overrides_of_the_documentation_are_valid(page: str, text: str) -> None:
    """Each ``--set`` names a key that there is and a value that it takes."""
    words = shlex.split(text, comments=True)
    overrides = [words[place + 1] for place, word in enumerate(words) if word == "--set"]
    load(None, overrides=overrides)


def test_toml_of_the_documentation_loads(tmp_path: Path) -> None:
    """Every TOML block is a configuration, as far as it goes."""
    found = [(path, text) for path in PAGES for text in blocks(path.read_text(), "toml")]
    assert found
    for path, text in found:
        experiment = tmp_path / path.with_suffix(".toml").name
        experiment.write_text(text)
        load(experiment, overrides=())


def test_python_of_the_documentation_compiles() -> None:
    """Every Python block is at least Python."""
    for path in PAGES:
        for text in blocks(path.read_text(), "python"):
            compile(text, str(path), "exec")


def test_links_between_pages_lead_to_files() -> None:
    """Relative links of all pages, those without a place in the page."""
    broken = [
        (str(path.relative_to(ROOT)), target)
        for path in PAGES
        for target in re.findall(r"\]\(([^)#:]+)\)", path.read_text())
        if not (path.parent / target).exists()
    ]
    assert broken == []


def keys_of(schema: dict[str, Any], document: dict[str, Any], path: str = "") -> Iterator[str]:
    """Yield every dotted key in a JSON schema, in whatever kind of table it is."""
    if "$ref" in schema:
        yield from keys_of(document["$defs"][schema["$ref"].rpartition("/")[2]], document, path)
    for option in [*schema.get("oneOf", ()), *schema.get("anyOf", ())]:
        yield from keys_of(option, document, path)
    for name, inner in schema.get("properties", {}).items():
        yield f"{path}{name}"
        yield from keys_of(inner, document, f"{path}{name}.")


def test_the_configuration_reference_has_every_key(from_code: ModuleType) -> None:
    """Found independently in the JSON schema: as a row, as a table, or as the kind of one."""
    listed = set()
    for table in from_code.configuration_tables():
        prefix = f"{table.path}." if table.path else ""
        kind = {table.kind.partition(" = ")[0]} if table.kind else set()
        listed |= {table.path} | {f"{prefix}{name}" for name in kind}
        listed |= {f"{prefix}{key.name}" for key in table.keys}
        assert all(key.description and key.type and key.default for key in table.keys)
    document = Config.model_json_schema()
    assert set(keys_of(document, document)) == listed - {""}


def test_the_reference_shows_the_help_of_every_command(from_code: ModuleType) -> None:
    """The command itself and those below it."""
    assert isinstance(COMMANDS, typer.core.TyperGroup)
    expected = {"fedlearn"} | {f"fedlearn {name}" for name in COMMANDS.commands}
    helps = from_code.command_helps()
    assert set(helps) == expected
    assert all(text.startswith("Usage: fedlearn") for text in helps.values())


def test_every_public_name_stands_in_the_python_reference() -> None:
    """Its module is documented, and the name is not left out of it."""
    page = (ROOT / "docs" / "reference" / "python.md").read_text()
    for name in fedlearn.__all__:
        value = getattr(fedlearn, name)
        found = re.search(
            rf"automodule:: {re.escape(value.__module__)}\n(   :members: (?P<only>.*)\n)?", page
        )
        assert found is not None, name
        assert found["only"] is None or name in found["only"].split(", "), name


def test_the_digits_experiment_spells_out_the_main_job() -> None:
    """So that ``fedlearn simulate`` and the file are one experiment."""
    experiment = load(ROOT / "simulations" / "digits" / "experiment.toml", overrides=())
    main_job = Config()
    # The file may give a number where the default is a rule for it: the policies are compared.
    assert experiment.straggler_policy() == main_job.straggler_policy()
    assert experiment.model_copy(update={"stragglers": main_job.stragglers}) == main_job


def test_each_experiment_ships_its_figures() -> None:
    """A README and what a short run is expected to give."""
    for experiment in ROOT.glob("simulations/*/experiment.toml"):
        assert (experiment.parent / "README.md").exists(), experiment
        assert (experiment.parent / "expected.json").exists(), experiment
