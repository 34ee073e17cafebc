"""A run on a Flower federation: whose ClientApps answer there, and what they are told."""

from collections.abc import Iterator
from typing import Annotated, Literal, TypeAlias

from pydantic import Field

from fedlearn.config.section import Problem, Section, told_as

Entries: TypeAlias = Annotated[
    dict[Annotated[str, Field(min_length=1)], bool | int | float | str],
    told_as("a table of texts, finite numbers and truth values", type="object"),
]
#: What is told with every message anyway.
_ROUND = "server-round"


class FlowerSection(Section):
    """A run on a Flower federation, by `flwr run`."""

    client_apps: Literal["fedlearn", "flower"] = Field(
        "fedlearn",
        description='What answers at the nodes: "fedlearn" is its own ClientApp; "flower" any that '
        "is written for Flower's own strategies, which trains as it likes and without secure "
        "aggregation, and is known by its node's id.",
    )
    train_config: Entries = Field(
        {}, description='Of "flower": what clients read in `config` when they train.'
    )
    evaluate_config: Entries = Field(
        {}, description='Of "flower": what clients read in `config` when they evaluate.'
    )

    @property
    def is_foreign(self) -> bool:
        """Whether the clients know nothing of fedlearn."""
        return self.client_apps == "flower"

    def problems(self) -> Iterator[Problem]:
        """Refuse what nobody would read, and an entry that is not the user's to set."""
        for name in ("train_config", "evaluate_config"):
            config = getattr(self, name)
            if config and not self.is_foreign:
                text = (
                    'is given, but client_apps is "fedlearn", whose clients are told how to train '
                    'by the table client; leave it out, or set client_apps to "flower"'
                )
                yield Problem((name, "client_apps"), text)
            if _ROUND in config:
                text = f'has "{_ROUND}", which is the round; leave it out'
                yield Problem((name,), text)
