"""What a client's process is started with."""

import json
from dataclasses import asdict, dataclass
from pathlib import Path

from fedlearn.client.conditions import Conditions
from fedlearn.client.policy import Policy


@dataclass(frozen=True, kw_only=True)
class RuntimeOptions:
    """How one client takes part.

    Attributes:
        home: The client's folder.
        trainer: Name of the user's trainer, ``"module:Class"`` or ``"path/file.py:Class"``.
        invitation: The file to enrol with, unless that is done.
        conditions: What must hold before and during training.
        policy: What is refused.
        num_threads: Threads that torch may use.
        niceness: Added to the process' own: 0 is a program like any other, 19 gives way to all.
    """

    home: Path
    trainer: str
    invitation: Path | None
    conditions: Conditions
    policy: Policy
    num_threads: int
    niceness: int

    def to_json(self) -> str:
        """Return the options as text, for another process."""
        return json.dumps(asdict(self), default=str)

    @classmethod
    def from_json(cls, text: str) -> "RuntimeOptions":
        """Return the options that :meth:`to_json` wrote."""
        values = json.loads(text)
        between = values["conditions"]["between"]
        conditions = {**values["conditions"], "between": between and tuple(between)}
        invitation = values["invitation"]
        return cls(
            **{
                **values,
                "home": Path(values["home"]),
                "invitation": invitation and Path(invitation),
                "conditions": Conditions(**conditions),
                "policy": Policy(**values["policy"]),
            }
        )
