"""What is observable of a run from outside: its records and checkpoints, as plain data."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from torch import Tensor


@dataclass(frozen=True)
class Row:
    """A client's row in the record of a round."""

    client_id: int
    status: str
    num_examples: int
    loss: float
    reason: str


@dataclass(frozen=True, kw_only=True)
class Round:
    """A round's record, and the contents of the checkpoints before and after it.

    Attributes:
        is_aggregated: Whether the model changed.
        rows: Clients of the last attempt, in the order of the record.
        in_flight: By client, the round of the model that it was training as the round began.
        tensors: The model after the round.
        kept: The clients' states after it: by client, then by name.
        server: The server optimizer's state, or SCAFFOLD's server control.
    """

    attempt: int
    is_aggregated: bool
    rows: Sequence[Row]
    train_loss: float
    metrics: Mapping[str, float]
    staleness: Mapping[int, int]
    in_flight: Mapping[int, int]
    tensors: Mapping[str, Tensor]
    kept: Mapping[int, Mapping[str, Tensor]]
    server: Mapping[str, Tensor]


@dataclass(frozen=True)
class NoiseDraw:
    """Noise as it was drawn.

    Attributes:
        values: The client's numbers that it was added to; empty for noise in a sum.
        noise: The noise in standard deviations.
        labels: For noise in a sum: the lane, the round and the attempt.
        client_id: The client that the numbers belong to, if that is known.
        round_num: The round that they belong to, if that is known.
    """

    values: Tensor
    noise: Tensor
    labels: tuple[str | int, ...] = ()
    client_id: int | None = None
    round_num: int | None = None


@dataclass(frozen=True)
class Run:
    """A finished run.

    Attributes:
        noise: All noise in it, in the order of drawing.
    """

    initial: Mapping[str, Tensor]
    rounds: Sequence[Round] = field(default_factory=tuple)
    noise: Sequence[NoiseDraw] = field(default_factory=tuple)


@dataclass(frozen=True)
class Refusal:
    """A run that did not start."""

    error: str
    message: str
