"""A run as its user sees it: history, curves, report, model."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from fedlearn.errors import ConfigError
from fedlearn.experiment.spending import spending
from fedlearn.privacy.spending import Spending
from fedlearn.rounds.records import RoundRecord, RunRecord
from fedlearn.store.runs import Database, StoredRun

if TYPE_CHECKING:  # who looks at a run, and not at its model, does not wait for torch
    from torch import Tensor, nn


@dataclass(frozen=True)
class Run:
    """One run in its store.

    Attributes:
        stored: Its durable record.
        make_model: Builds its network; ``None`` if the caller has to say.
    """

    stored: StoredRun
    make_model: "Callable[[], nn.Module] | None" = None

    @property
    def name(self) -> str:
        """Its name."""
        return self.stored.name

    @property
    def path(self) -> Path:
        """Its folder."""
        return self.stored.path

    @property
    def record(self) -> RunRecord:
        """Its status, configuration and versions."""
        return self.stored.record

    @property
    def history(self) -> list[RoundRecord]:
        """All finished rounds, in order."""
        return self.stored.rounds()

    @property
    def privacy(self) -> Spending | None:
        """What has been spent of the privacy of its clients by now, ε among it.

        ``None`` where it promises nothing. It is found anew each time, which takes up to a second.
        """
        return spending(self.stored)

    def plot(self, path: Path | str | None = None) -> Path:
        """Draw the curves as PNG and return the file, ``curves.png`` in the run's folder."""
        from fedlearn.experiment.plot import plot  # noqa: PLC0415 (matplotlib takes half a second)

        target = self.path / "curves.png" if path is None else Path(path)
        return plot([(self.record, self.history)], target)

    def report(self, path: Path | str | None = None) -> Path:
        """Write one self-contained HTML file, ``report.html`` in the run's folder."""
        from fedlearn.experiment.report import report  # noqa: PLC0415 (it draws, too)

        target = self.path / "report.html" if path is None else Path(path)
        return report(self.record, self.history, target, privacy=self.privacy)

    def weights(self, *, best: bool = True) -> "dict[str, Tensor]":
        """Return the tensors of the best model, or of the last.

        They are in the order of the network's ``state_dict``, where it is known how that is built;
        otherwise all parameters come before all buffers.

        Raises:
            StoreError: There is no checkpoint, or it is damaged.
        """
        found = self.stored.weights(best=best)
        if self.make_model is None:
            return found
        import torch  # noqa: PLC0415 (see above)

        from fedlearn.training.keyed_dropout import untouched  # noqa: PLC0415 (likewise)

        with untouched(torch.default_generator):
            places = {name: place for place, name in enumerate(self.make_model().state_dict())}
        return dict(sorted(found.items(), key=lambda item: places.get(item[0], len(places))))

    def load_model(
        self, make_model: "Callable[[], nn.Module] | None" = None, *, best: bool = True
    ) -> "nn.Module":
        """Return the trained network in evaluation mode: the best, or the last.

        Raises:
            ConfigError: No function builds the network, or it keeps a network that cannot be
                copied.
            ValueError: It is not the network that was trained.
        """
        from fedlearn.core.model_factory import ModelFactory  # noqa: PLC0415 (it takes torch)
        from fedlearn.core.params import Params  # noqa: PLC0415 (likewise)

        build = make_model or self.make_model
        if build is None:
            raise ConfigError(f"{self.name}: pass make_model, the function that builds the network")
        model, weights = ModelFactory.of(build)(), self.weights(best=best)
        like = Params.of(model)
        missing = sorted((like.named().keys() | like.layout.aliases.keys()) ^ weights.keys())
        if missing:
            raise ValueError(f"the network and the weights of {self.name} differ in {missing[:3]}")
        constants = {name: weights[name] for name in like.constants}
        Params(like.layout, like.layout.pack(weights), constants).load_into(model)
        return model.eval()


def begin(record: RunRecord, database: Database, *, seed: int) -> StoredRun:
    """Make the run of ``record``, with a name that is drawn if it has none.

    Raises:
        StoreError: The name is taken, or the run cannot be written.
    """
    if record.name:
        return database.create(record)
    from fedlearn.core.randomness import Seed  # noqa: PLC0415 (it takes torch)

    return database.create_named(record, seed=Seed(seed).derive(record.created_utc))
