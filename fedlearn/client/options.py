"""What a client's process is started with."""

import json
from dataclasses import asdict, dataclass
from pathlib import Path

from fedlearn.client.conditions import Conditions
from fedlearn.client.policy import Policy, SecureAggregationPolicy


@dataclass(frozen=True, kw_only=True)
class RuntimeOptions:
    """How one client takes part.

    Attributes:
        home: The client's folder.
        trainer: Name of the user's trainer, ``"module:Class"`` or ``"path/file.py:Class"``.
        invitation: The file to enrol with, unless that is done.
        conditions: What must hold before and during training.
        policy: What is refused.
        num_threads: Threads that torch may use. Masks of secure aggregation are expanded on as many
            as there are cores.
        niceness: Added to the process' own: 0 is a program like any other, 19 gives way to all.
        roster: File with the identity keys of the other clients (`fedlearn roster`), which are then
            believed and no others; ``None``: the coordinator is believed where it first tells them.
    """

    home: Path
    trainer: str
    invitation: Path | None
    conditions: Conditions
    policy: Policy
    num_threads: int
    niceness: int
    roster: Path | None = None

    def to_json(self) -> str:
        """Return the options as text, for another process."""
        return json.dumps(asdict(self), default=str)

    @classmethod
    def from_json(cls, text: str) -> "RuntimeOptions":
        """Return the options that :meth:`to_json` wrote."""
        values = json.loads(text)
        between = values["conditions"]["between"]
        conditions = {**values["conditions"], "between": between and tuple(between)}
        secure = SecureAggregationPolicy(**values["policy"]["secure_aggregation"])
        invitation, roster = values["invitation"], values["roster"]
        return cls(
            **{
                **values,
                "home": Path(values["home"]),
                "invitation": invitation and Path(invitation),
                "roster": roster and Path(roster),
                "conditions": Conditions(**conditions),
                "policy": Policy(**{**values["policy"], "secure_aggregation": secure}),
            }
        )
