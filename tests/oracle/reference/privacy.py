r"""Differential privacy: clips, noise, and the release of a sum.

=========================== ================================================================
symbol                      here
=========================== ================================================================
:math:`C, z`                ``PRIVATE_NORM``, ``NOISE_MULTIPLIER``
:math:`\xi`                 noise with a standard deviation of 1, as the run drew it
:math:`A`                   ``NUM_CORRUPTED``: clients whose noise share an attacker may know
:math:`\gamma, \eta_C, b`   ``QUANTILE``, ``CLIP_RATE``, and which clients were ``below``
:math:`c_1`                 ``second_diagonal``: the next round subtracts this much noise
=========================== ================================================================

The mode decides who adds noise. "central", "adaptive" and "banded": the server, to the sum of
clipped updates. "distributed": each client a share, or a simulated sum all shares at once.
"local": each client, to its update. "example": each client, to each of its gradients.
"""

import math
from collections.abc import Sequence
from functools import cache

import torch
from torch import Tensor

from tests.oracle.configuration import NUM_ROUNDS, Configuration
from tests.oracle.observation import NoiseDraw
from tests.oracle.reference.model import Tensors, clip, norm
from tests.oracle.reference.policies import LEAST_SUMMED, num_wanted

#: Clip norm of an update, or of an example's gradient; an adaptive norm starts here.
PRIVATE_NORM = 0.25
#: Standard deviation of the noise, in clip norms.
NOISE_MULTIPLIER = 0.6
QUANTILE, CLIP_RATE = 0.7, 0.2
#: A tenth of four clients, rounded up.
NUM_CORRUPTED = 1
#: Differences up to this size are ignored when looking up a client's noise by its numbers.
ALIKE = 1e-5
#: Modes in which the server sums clipped updates and adds the noise.
CENTRAL = ("central", "adaptive", "banded")


class RecordedNoise:
    """The noise of a run, as it was drawn.

    A client's noise is found by the numbers that it was added to, and by client and round if these
    are known: EASGD's clients all send zeros at first, and a client whose examples have no weight
    always does. The last draw counts, since earlier ones for the same numbers belong to discarded
    attempts.
    """

    def __init__(self, draws: Sequence[NoiseDraw]) -> None:
        in_sums = [each for each in draws if each.labels]
        self._of_clients = [each for each in draws if not each.labels]
        self._in_sums = {each.labels: each.noise for each in in_sums}  # the last draw counts
        deltas = (each.labels for each in in_sums if each.labels[0] == "delta")
        self._turns = {labels: turn for turn, labels in enumerate(deltas)}

    def of_client(self, client_id: int, round_num: int, values: Tensor) -> Tensor:
        """Return the noise that was added to these numbers of a client in a round."""
        draws = [
            each
            for each in self._of_clients
            if each.values.shape == values.shape
            and each.client_id in (None, client_id)
            and each.round_num in (None, round_num)
        ]
        distances = [float((each.values - values).abs().max()) for each in draws]
        nearest = min(distances, default=math.inf)
        for draw, distance in zip(reversed(draws), reversed(distances), strict=True):
            if distance <= nearest + ALIKE:
                return draw.noise
        return torch.zeros(())  # no noise was added to them

    def in_sum(self, lane: str, round_num: int, attempt: int) -> Tensor:
        """Return the noise in the sum of a round."""
        return self._in_sums.get((lane, round_num, attempt), torch.zeros(()))

    def turn(self, round_num: int, attempt: int) -> int:
        """Return how many sums had been released before, including lost ones."""
        return self._turns.get(("delta", round_num, attempt), -1)


def noised(values: Tensors, noise: Tensor, sigma: float) -> Tensors:
    """Add noise, one vector for all tensors, scaled by ``sigma``."""
    sizes = [value.numel() for value in values.values()]
    parts = (sigma * noise).expand(sum(sizes)).split(sizes)
    return {
        name: value + part.view(value.shape)
        for part, (name, value) in zip(parts, values.items(), strict=True)
    }


def flat(tensors: Tensors) -> Tensor:
    """Concatenate tensors into one vector."""
    return torch.cat([value.flatten() for value in tensors.values()])


def share() -> float:
    """Return the standard deviation of the noise that a client adds in a secure sum.

    The fewest clients in a sum add all of the noise together, even if the noise of
    ``NUM_CORRUPTED`` of them is known.
    """
    return NOISE_MULTIPLIER * PRIVATE_NORM / math.sqrt(LEAST_SUMMED - NUM_CORRUPTED)


def begin(c: Configuration, trained: Tensors) -> dict[str, Tensors]:
    """Return the server's initial state for the noise."""
    if c.privacy == "adaptive":
        return {"clip_norm": {"": torch.tensor(PRIVATE_NORM, dtype=torch.float64)}}
    if c.privacy == "banded":
        zeros = {name: torch.zeros_like(value) for name, value in trained.items()}
        return {"last_sum": zeros, "last_estimate": zeros, "turn": {"": torch.tensor(-1)}}
    return {}


def release(
    c: Configuration,
    trained: Tensors,
    deltas: Sequence[Tensors],
    state: dict[str, Tensors],
    *,
    noise: RecordedNoise,
    at: tuple[int, int],
) -> tuple[Tensors, dict[str, Tensors]]:
    """Return the noisy mean and the server's new state.

    The number of reports is not public, so the sum is divided by the wanted number
    (McMahan et al., 2018, algorithm 1).

    Args:
        c: The configuration.
        trained: The trained parameters.
        deltas: Their deltas; in a secure sum these are already clipped.
        state: As :func:`begin` returns it.
        noise: The noise of the run.
        at: Round and attempt.
    """
    bound = float(state["clip_norm"][""]) if c.privacy == "adaptive" else PRIVATE_NORM
    if c.privacy == "distributed":
        bound = math.inf
    clipped = [clip(each, bound) for each in deltas]
    x = {
        name: sum((each[name] for each in clipped), torch.zeros_like(value))
        for name, value in trained.items()
    }
    drawn, sigma = noise.in_sum("delta", *at), NOISE_MULTIPLIER * PRIVATE_NORM
    if c.privacy == "distributed":
        drawn = noise.in_sum("parameters", *at)  # zero if clients have added their shares
        released = noised(x, drawn, share() * math.sqrt(len(deltas)))
    elif c.privacy == "banded":
        estimate = noised(x, drawn, sigma * math.hypot(1, second_diagonal()))
        released, state = with_noise_taken_back(x, estimate, state, noise.turn(*at))
    elif c.privacy == "adaptive":
        z_delta, z_count = divide_noise(num_wanted(c))
        released = noised(x, drawn, z_delta * bound)
        bits = sum(0.5 if norm(each) <= bound else -0.5 for each in deltas)
        count = bits + z_count / 2 * noise.in_sum("below_norm", *at).sum()
        moved = bound * torch.exp(-CLIP_RATE * (count / num_wanted(c) + 0.5 - QUANTILE))
        state = state | {"clip_norm": {"": moved}}
    else:
        released = noised(x, drawn, sigma)
    return {name: value / num_wanted(c) for name, value in released.items()}, state


def divide_noise(num_expected: int) -> tuple[float, float]:
    r"""Return the noise multipliers of updates, and of the count of updates below the clip norm.

    Together they cost as much as z alone would: :math:`z^{-2} = z_\Delta^{-2} + (2 \sigma_b)^{-2}`
    (Andrew et al., 2021, theorem 1). :math:`\sigma_b` is a twentieth of the clients, or so much
    that the count takes no more than a twentieth of the budget.
    """
    z_count = max(2 * num_expected / 20, NOISE_MULTIPLIER / math.sqrt(1 / 20))
    return (NOISE_MULTIPLIER**-2 - z_count**-2) ** -0.5, z_count


def with_noise_taken_back(
    x: Tensors, estimate: Tensors, state: dict[str, Tensors], turn: int
) -> tuple[Tensors, dict[str, Tensors]]:
    r"""Return the estimate of a sum, without the known part of the previous turn's noise.

    With :math:`c = (1, c_1)`, a turn releases :math:`y_t = x_t + c_1 x_{t-1} + z C \|c\| \xi`, and
    the estimate is :math:`\hat x_t = y_t - c_1 \hat x_{t-1}`. A lost turn counts as empty.
    """
    if turn == int(state["turn"][""]) + 1:
        last, last_estimate, c_1 = state["last_sum"], state["last_estimate"], second_diagonal()
        estimate = {
            name: value + c_1 * (last[name] - last_estimate[name])
            for name, value in estimate.items()
        }
    kept = {"last_sum": x, "last_estimate": estimate, "turn": {"": torch.tensor(turn)}}
    return estimate, state | kept


@cache
def second_diagonal() -> float:
    """Return the c_1, in 1024ths, with the least noise in prefix sums of rounds.

    It minimizes ‖c‖² ‖A C⁻¹‖²_F, where C has c on its diagonals, and A sums.
    """
    ones = torch.ones(NUM_ROUNDS, NUM_ROUNDS, dtype=torch.float64)
    a, identity = ones.tril(), torch.eye(NUM_ROUNDS, dtype=torch.float64)

    def error(c_1: float) -> float:
        banded = identity + c_1 * torch.diag(ones[0, 1:], -1)
        return (1 + c_1**2) * float((a @ torch.linalg.inv(banded)).square().sum())

    return min((each / 1024 for each in range(1025)), key=error)
