"""The weights that a run of the queue starts from: those of an earlier run, or of a file.

They are copied beside the queue, under the name of the run that needs them: a file when the run is
submitted, an earlier run's model when the run first starts. Whatever happens to their source later
changes nothing.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from hashlib import sha256
from pathlib import Path
from typing import TypeVar

import torch
from safetensors import SafetensorError
from safetensors.torch import load, save
from torch import Tensor, nn

from fedlearn import assembly
from fedlearn.config.privacy import PrivacySection
from fedlearn.core.files import explain_disk_errors
from fedlearn.core.model_factory import ModelFactory
from fedlearn.core.params import Params
from fedlearn.errors import ConfigError, StoreError
from fedlearn.experiment.spending import section_of
from fedlearn.rounds.scheduling import QueuedRun
from fedlearn.store.queue import RunQueue
from fedlearn.store.runs import Database, StoredRun

ComponentsT = TypeVar("ComponentsT", bound=assembly.Components)


@dataclass(frozen=True, kw_only=True)
class StartingWeights:
    """Weights that a run starts from.

    Attributes:
        source: Where they come from, JSON values only, with their digest: ``{"run": NAME, "round":
            ROUNDS, "sha256": HEX}`` or ``{"file": PATH, "sha256": HEX}``.
        content: The safetensors file.
    """

    source: Mapping[str, str]
    content: bytes

    @classmethod
    def of(cls, source: Mapping[str, str], content: bytes) -> "StartingWeights":
        """Return weights with their digest."""
        return cls(source={**source, "sha256": sha256(content).hexdigest()}, content=content)


@dataclass(frozen=True)
class StartedModel:
    """Builds a network that starts from given weights; see :class:`ModelFactory`.

    Attributes:
        make_model: Builds the network.
        weights: Values of all of its parameters and saved buffers, by name.
    """

    make_model: Callable[[], nn.Module]
    weights: Mapping[str, Tensor]

    def __call__(self) -> nn.Module:
        """Build the network, and copy the weights into it."""
        module = self.make_model()
        with torch.no_grad():
            for name, value in module.state_dict().items():
                if name in self.weights:  # only the other names of tied tensors are not
                    value.copy_(self.weights[name])
        return module


def find_weights(
    source: Mapping[str, str],
    components: assembly.Components,
    database: Database,
    *,
    file: Path | None = None,
) -> StartingWeights | None:
    """Read the weights that a run is submitted with, and check that it can start from them.

    Args:
        source: Where they come from; empty: the run starts from the model's own.
        components: The run that starts from them.
        database: The database with the earlier runs.
        file: Where the file is, if not where ``source`` says.

    Returns:
        The weights; ``None`` if there are none, or if they are those that a run will have later.

    Raises:
        ConfigError: They do not fit to the model, or would break a promise of privacy.
        StoreError: They cannot be read, or that round's model is not kept.
    """
    if not source:
        return None
    if not components.config.has_model:
        raise ConfigError("--from: the experiment is a query, which has no model; leave it out")
    if "file" in source:
        path = file or Path(source["file"])
        with explain_disk_errors(path, raises=StoreError, doing="read"):
            found = StartingWeights.of(source, path.read_bytes())
    elif any(record.name == source["run"] for record in database.runs()):
        stored = database.run(source["run"])
        require_paid(stored, components.config.privacy)
        if "round" not in source and not stored.checkpoints():
            return None
        found = read_model(stored, source.get("round"))
    elif "round" in source:
        raise ConfigError(
            f"--from {source['run']}@{source['round']}: that run has not begun; leave out the "
            "round to start from its last model"
        )
    else:
        return None
    with_weights(components, found)
    # A run's last model is that of the day on which the new run starts.
    return found if "round" in source or "file" in source else None


def pin_weights(
    run: QueuedRun, components: ComponentsT, queue: RunQueue
) -> tuple[ComponentsT, tuple[str, ...]]:
    """Return the components of a run that starts, with its weights, and notes about them.

    The first call decides on the weights of an earlier run, and copies them; later ones use that
    copy.

    Raises:
        ConfigError: They do not fit to the model, or would break a promise of privacy.
        Fenced: Another process has taken over.
        StoreError: They cannot be read, or were changed.
    """
    if not run.start_from:
        return components, ()
    section = components.config.privacy
    if "sha256" in run.start_from:
        start = StartingWeights(source=run.start_from, content=queue.read_weights(run))
    else:
        stored = queue.database.run(run.start_from["run"])
        require_paid(stored, section)
        start = read_model(stored, None)
    started = with_weights(components, start)
    queue.pin_weights(run.name, start.source, start.content)
    return started, (describe_start(start.source, section),)


def read_model(stored: StoredRun, num_rounds: str | None) -> StartingWeights:
    """Read a run's model after some rounds, or its last one.

    Raises:
        StoreError: The run has no such model, or it cannot be read.
    """
    found, weights = stored.load_weights(
        best=False, num_rounds=None if num_rounds is None else int(num_rounds)
    )
    return StartingWeights.of({"run": stored.name, "round": str(found)}, save(weights))


def require_paid(stored: StoredRun, section: PrivacySection) -> None:
    """Check that a private run may start from the model of ``stored``.

    What that model tells about clients must have been charged to a ledger, too.

    Raises:
        ConfigError: It was not.
    """
    if not section.is_on or section.reproducible:
        return
    source = section_of(stored.record)
    if not source.is_on or source.reproducible:
        raise ConfigError(
            f"--from {stored.name}: that run has no differential privacy, and what its model "
            "learned of the clients would be part of each model of this private run, without being "
            "charged; start from a private run, or from a file of public weights"
        )


def describe_start(source: Mapping[str, str], section: PrivacySection) -> str:
    """Describe the weights that a run starts from, and what they cost, for the user."""
    is_private = section.is_on and not section.reproducible
    digest = source["sha256"][:12]
    if "file" in source:
        cost = (
            "; their own privacy cost is unknown and not charged, so they must not have been "
            "trained on the clients' examples"
        )
        return f"starts from {source['file']} ({digest})" + (cost if is_private else "")
    text = f"starts from {source['run']} after {source['round']} rounds ({digest})"
    cost = ": a release that is already charged to the ledger, so starting from it costs no ε"
    return text + (cost if is_private else "")


def with_weights(components: ComponentsT, start: StartingWeights) -> ComponentsT:
    """Let the model of a run start from these weights.

    Raises:
        ConfigError: They are no safetensors file, or do not fit to the model.
    """
    origin = start.source.get("file") or f"{start.source['run']}@{start.source['round']}"
    try:
        weights = load(start.content)
    except SafetensorError as error:
        raise ConfigError(f"--from {origin} is no safetensors file: {error}") from error
    if (problem := _find_difference(weights, components.make_model())) is not None:
        raise ConfigError(
            f"--from {origin}: {problem}; start from weights of the same model, or change the model"
        )
    make_model = ModelFactory.of(StartedModel(components.make_model, weights))
    return replace(components, make_model=make_model)


def _find_difference(weights: Mapping[str, Tensor], model: nn.Module) -> str | None:
    """Describe the first tensor in which ``weights`` and ``model`` differ."""
    params = Params.of(model)
    expected, aliases = params.to_tensors(), params.layout.aliases
    for name, value in expected.items():
        if (given := weights.get(name)) is None:
            return f"there is no {name}, which the model has with {_describe(value)}"
        # A trained tensor is stored in the dtype in which the server adds up.
        dtypes = {
            value.dtype,
            params.vector.dtype if name in params.layout.by_name else value.dtype,
        }
        if given.shape != value.shape or given.dtype not in dtypes:
            return f"{name} has {_describe(given)}, but the model has {_describe(value)}"
        if given.is_floating_point() and not bool(given.isfinite().all()):
            return f"{name} has values that are not finite"
    for name, given in weights.items():
        if (known := aliases.get(name)) is not None and not torch.equal(given, weights[known]):
            return f"{name} and {known} differ, but are one tensor in the model"
        if name not in expected and known is None:
            return f"{name} is not in the model"
    return None


def _describe(tensor: Tensor) -> str:
    return f"shape {list(tensor.shape)} and dtype {str(tensor.dtype).removeprefix('torch.')}"
