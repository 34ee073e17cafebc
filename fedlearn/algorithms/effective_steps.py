"""How far SGD moves along the gradients of a round, which momentum makes farther."""

from functools import lru_cache

from torch import Tensor


@lru_cache(maxsize=1 << 16)
def effective_steps(num_steps: int, *, momentum: float, pull: float) -> float:
    r"""Return :math:`\|a_i\|_1`: how far SGD goes along gradients of 1, in learning rates.

    Args:
        num_steps: Number of steps, >= 0.
        momentum: Momentum of SGD.
        pull: Learning rate times FedProx's mu.

    Example:
        >>> effective_steps(3, momentum=0.0, pull=0.0)
        3.0
        >>> effective_steps(3, momentum=0.5, pull=0.0)  # 1 + 1.5 + 1.75
        4.25
    """
    distance = velocity = 0.0
    for _ in range(num_steps):
        velocity = momentum * velocity + 1.0 - pull * distance
        distance += velocity
    return distance


def count_effective_steps(num_steps_K: Tensor, *, momentum: float, pull: float = 0.0) -> Tensor:
    """Return :func:`effective_steps` for each of K numbers of steps: [K].

    Example:
        >>> import torch
        >>> count_effective_steps(torch.tensor([1.0, 3.0]), momentum=0.5)
        tensor([1.0000, 4.2500])
    """
    if not momentum and not pull:
        return num_steps_K
    counts = map(round, num_steps_K.tolist())
    return num_steps_K.new_tensor(
        [effective_steps(count, momentum=momentum, pull=pull) for count in counts]
    )
