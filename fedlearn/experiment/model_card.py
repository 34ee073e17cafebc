"""The model card of a release: Markdown with a header, as model hubs expect it."""

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, TypeAlias

from fedlearn.core.json_values import iterate_leaves
from fedlearn.core.quantities import format_number
from fedlearn.core.words import replace_unprintable
from fedlearn.identity.releases import SignedRelease

#: Name of the card's file.
CARD_FILE = "README.md"

_Facts: TypeAlias = Mapping[str, Any]  # Any: JSON

#: Tables of the configuration about how the model was trained.
_TRAINING = (
    "model",
    "algorithm",
    "client",
    "cohort",
    "aggregation",
    "compression",
    "asynchronous",
    "secure_aggregation",
)


def render_card(signed: SignedRelease) -> str:
    """Render the card of a release from its signed statement alone."""
    facts = signed.facts
    parts = [
        _render_header(facts),
        f"# {_code(facts['run'])} after {facts['num_rounds']} rounds",
        _describe_origin(facts),
        "## Training data",
        _render_table(_flatten(facts["config"].get("data"))) or "The record does not describe it.",
        "## Training",
        _render_table(_describe_training(facts)),
        "## Evaluation",
        _describe_metrics(facts),
        "## Privacy",
        _describe_privacy(facts),
        "## Limits",
        _describe_limits(facts),
        "## Use",
        _USE.format(tag=signed.id[:12]),
        "## Versions",
        _render_table(sorted(facts["versions"].items())),
        "## Integrity",
        _render_table(
            [
                ("release", signed.id),
                ("SHA-256 of the weights", facts["sha256"]),
                ("SHA-256 of the configuration", facts["config_hash"]),
                ("public key", signed.public_key),
                ("signature", signed.signature),
            ]
        ),
    ]
    return "\n\n".join(parts) + "\n"


_USE = """\
```python
import fedlearn as fl

release = fl.load_release("{tag}")  # checks the signature
model.load_state_dict(release.weights())
```"""


def _render_header(facts: _Facts) -> str:
    algorithm = facts["config"].get("algorithm")
    name = algorithm.get("name") if isinstance(algorithm, Mapping) else None
    tags = ["federated-learning", *([str(name)] if name else [])]
    # JSON strings are YAML strings, whatever is in them.
    return "\n".join(
        [
            "---",
            "library_name: fedlearn",
            "tags:",
            *(f"- {json.dumps(each)}" for each in tags),
            "---",
        ]
    )


def _describe_origin(facts: _Facts) -> str:
    how = (
        "real clients, which kept their data"
        if facts["is_deployed"]
        else "clients simulated on one machine"
    )
    return (
        f"A model trained by federated learning with {how}. {facts['num_clients_reported']:,} of "
        f"{facts['num_clients_asked']:,} clients that were asked have contributed. The run began "
        f"at {_code(facts['run_created_utc'])}, the release is of {_code(facts['released_utc'])}."
    )


def _describe_training(facts: _Facts) -> Iterator[tuple[str, object]]:
    yield "rounds", f"{facts['num_rounds']} of {facts['planned_rounds']}"
    for name in _TRAINING:
        for key, value in _flatten(facts["config"].get(name)):
            yield f"{name}.{key}", value


def _describe_metrics(facts: _Facts) -> str:
    numbers = [
        (name, "not a number" if value is None else format_number(value))
        for name, value in sorted(facts["metrics"].items())
    ]
    if not numbers:
        return "The model was not evaluated."
    return f"The last evaluation up to this round:\n\n{_render_table(numbers)}"


def _describe_privacy(facts: _Facts) -> str:
    spent = facts["privacy"]
    if spent is None:
        return (
            "No differential privacy is promised: the weights may reveal examples that they were "
            "trained on."
        )
    return (
        f"The run's population has spent ε = {spent['epsilon']:.4g} at δ = {spent['delta']:g} on "
        f"released models, and {spent['epsilon_with_cohorts']:.4g} against an observer who knows "
        f"who took part. Hidden is {spent['hidden']}."
    )


def _describe_limits(facts: _Facts) -> str:
    limits = [
        "The metrics are those of the run's own evaluation; on other data they may differ.",
        "Clients that were not asked, or did not report, are not represented.",
        "What clients trained on cannot be checked from here: a client may have sent anything.",
    ]
    if facts["num_rounds"] < facts["planned_rounds"]:
        limits.append("It is not the model of the last planned round.")
    if not facts["is_deployed"]:
        limits.append("The clients are simulated: real ones differ in data, devices and failures.")
    return "\n".join(f"- {each}" for each in limits)


def _flatten(table: object) -> list[tuple[str, object]]:
    """Return the settings in a table of the configuration, without those that have no effect."""
    if not isinstance(table, Mapping) or table.get("mode") == "off":
        return []
    return [(key, value) for key, value in iterate_leaves(table) if value not in (None, {}, [])]


def _render_table(rows: Iterator[tuple[str, object]] | Sequence[tuple[str, object]]) -> str:
    lines = [f"| {_code(name)} | {_code(value)} |" for name, value in rows]
    return "\n".join(["| | |", "| --- | --- |", *lines]) if lines else ""


def _code(value: object) -> str:
    """Format a value as code, in which Markdown and HTML have no effect."""
    text = replace_unprintable(value if isinstance(value, str) else json.dumps(value))
    # A backtick would end the code, and a bar the cell.
    return f"`{text.replace('`', chr(0x27)).replace('|', '¦') or ' '}`"
