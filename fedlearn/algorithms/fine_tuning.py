"""Fine-tuning at evaluation: clients train a copy of their model before they measure it.

It says how good a model is as a start for each client, for any algorithm. What was trained is
discarded, and no client state changes.
"""

from dataclasses import dataclass, replace

from fedlearn.algorithms.extra_settings import ExtraSettings
from fedlearn.algorithms.gradient_clipping import ClippedGradients
from fedlearn.algorithms.local import LocalUpdate, LocalWork, iter_updates
from fedlearn.algorithms.round_settings import replace_learning_rate
from fedlearn.core.randomness import Seed
from fedlearn.errors import ConfigError


@dataclass(frozen=True, kw_only=True)
class FineTuning:
    """How clients fine-tune.

    Attributes:
        local: The clients' optimizer.
        seed: Seed of the run, from which the orders of the examples follow.
    """

    local: LocalUpdate
    seed: Seed


def build_fine_tuning(
    local: LocalUpdate, *, num_epochs: int, learning_rate: float | None = None, seed: Seed
) -> FineTuning | None:
    """Return how clients fine-tune for some epochs; ``None`` for no epochs.

    They train all parameters by the optimizer inside their local update, with gradient clipping if
    there is any. What an algorithm adds to it, such as a frozen head or a correction towards other
    clients, is left out.

    Args:
        local: The clients' local update.
        num_epochs: Epochs over a client's examples, >= 0.
        learning_rate: Step size, > 0; ``None``: that of the local update.
        seed: Seed of the run.

    Raises:
        ConfigError: The optimizer's epochs or its learning rate cannot be set.

    Example:
        >>> import fedlearn as fl
        >>> local = fl.LocalSgd(epochs=5, batch_size=10, learning_rate=0.1)
        >>> algorithm = fl.FedBABU(local, head_layers=["head.*"])
        >>> tuning = build_fine_tuning(algorithm.local, num_epochs=1, seed=fl.Seed(0))
        >>> tuning.local
        LocalSgd(epochs=1, batch_size=10, shuffle=True, drop_last=False, max_steps=None, \
learning_rate=0.1, momentum=0.0, weight_decay=0.0, keep_momentum=False)
    """
    if num_epochs == 0:
        return None
    optimizer, *wrappers = iter_updates(local)
    if not isinstance(optimizer, LocalWork):
        raise ConfigError(
            f"evaluation.fine_tune_epochs is {num_epochs}, but {type(optimizer).__name__} does not "
            "inherit from LocalWork, so its epochs cannot be set; inherit from it, or give 0"
        )
    tuned: LocalUpdate = replace(optimizer, epochs=num_epochs, max_steps=None)
    if learning_rate is not None:
        try:
            tuned = replace_learning_rate(tuned, learning_rate)
        except ValueError as error:
            raise ConfigError(f"evaluation.fine_tune_learning_rate: {error}") from error
    for wrapper in wrappers:
        if isinstance(wrapper, ClippedGradients | ExtraSettings):
            tuned = replace(wrapper, inner=tuned)
    return FineTuning(local=tuned, seed=seed)
