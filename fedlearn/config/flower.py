"""Configuration of a run on a Flower federation: which ClientApps answer its messages."""

from collections.abc import Iterator
from typing import Annotated, Literal, TypeAlias

from pydantic import Field

from fedlearn.config.section import Problem, Section, describe_as

Entries: TypeAlias = Annotated[
    dict[Annotated[str, Field(min_length=1)], bool | int | float | str],
    describe_as("a table of texts, finite numbers and truth values", type="object"),
]
#: The entry that fedlearn itself puts into every message.
ROUND = "server-round"


def is_foreign(client_apps: object) -> bool:
    """Return whether this value of ``client_apps`` means ClientApps written without fedlearn."""
    return client_apps in ("flower", "flower-legacy")


class FlowerSection(Section):
    """A run on a Flower federation, by `flwr run`."""

    client_apps: Literal["fedlearn", "flower", "flower-legacy"] = Field(
        "fedlearn",
        description='What answers at the nodes: "fedlearn" is its own ClientApp; "flower" any that '
        "is written for Flower's own strategies, which trains as it likes and without secure "
        "aggregation, and is known by its node's id; \"flower-legacy\" is one of Flower's earlier "
        "API (client_fn, NumPyClient).",
    )
    evaluate_config: Entries = Field(
        {},
        description="For Flower's apps: entries of `config` when clients evaluate. Those for "
        "training are in client.extra.",
    )

    @property
    def is_foreign(self) -> bool:
        """Whether the ClientApps are written without fedlearn."""
        return is_foreign(self.client_apps)

    @property
    def is_legacy(self) -> bool:
        """Whether the ClientApps use Flower's earlier API."""
        return self.client_apps == "flower-legacy"

    def problems(self) -> Iterator[Problem]:
        """Refuse entries that no client would read, and the entry that fedlearn sets itself."""
        if self.evaluate_config and not self.is_foreign:
            text = (
                'is given, but client_apps is "fedlearn", whose clients get no settings when they '
                'evaluate; leave it out, or set client_apps to "flower"'
            )
            yield Problem(("evaluate_config", "client_apps"), text)
        if ROUND in self.evaluate_config:
            yield Problem(("evaluate_config",), f'has "{ROUND}", which is the round; leave it out')
