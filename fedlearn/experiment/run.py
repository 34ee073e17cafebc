"""The public view of a run: history, curves, report and model."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from fedlearn.config.tables import has_plan
from fedlearn.errors import ConfigError, StoreError
from fedlearn.experiment.clients import explain_absence, load_clients
from fedlearn.experiment.data_names import load_data_names
from fedlearn.experiment.notebook import render_box, render_table
from fedlearn.experiment.progress import describe_end
from fedlearn.experiment.spending import load_spending
from fedlearn.experiment.summary import summarize
from fedlearn.privacy.spending import Spending
from fedlearn.rounds.records import RoundRecord, RunRecord, RunStatus
from fedlearn.store.runs import Database, StoredRun
from fedlearn.training.data_names import DataNames

if TYPE_CHECKING:  # importing torch takes a second, and only a run's model needs it
    from torch import Tensor, nn

    from fedlearn.core.client_metrics import ClientMetrics
    from fedlearn.experiment.statistics_result import StatisticsResult

#: Of the picture in a notebook.
_CURVES_SHOWN, _CURVE_INCHES = 2, (5.8, 3.2)


@dataclass(frozen=True)
class Run:
    """One run in its store.

    Attributes:
        stored: The durable record of the run.
        make_model: Builds the network; ``None``: :meth:`load_model` needs it as an argument.

    Example:
        >>> from tempfile import TemporaryDirectory
        >>> import torch
        >>> import fedlearn as fl
        >>> data = fl.from_arrays(
        ...     torch.eye(10), torch.arange(10) % 2, partition=fl.Iid(num_clients=3),
        ...     test_fraction=0.2, seed=0,
        ... )
        >>> with TemporaryDirectory() as folder:
        ...     run = fl.simulate(
        ...         lambda: torch.nn.Linear(10, 2), data, fl.FedSGD(learning_rate=0.1),
        ...         num_rounds=2, cohort={"num_wanted": 3}, store={"runs_dir": folder},
        ...     )
        ...     len(run.history), run.record.status.value, run.weights()["weight"].shape
        run ...
        (2, 'done', torch.Size([2, 10]))
    """

    stored: StoredRun
    make_model: "Callable[[], nn.Module] | None" = None

    @property
    def name(self) -> str:
        """The name of the run."""
        return self.stored.name

    @property
    def path(self) -> Path:
        """The folder of the run."""
        return self.stored.path

    @property
    def record(self) -> RunRecord:
        """Status, configuration and versions of the run."""
        return self.stored.record

    @property
    def history(self) -> list[RoundRecord]:
        """All finished rounds, in order."""
        return self.stored.rounds()

    @property
    def privacy(self) -> Spending | None:
        """The privacy spent on the run's clients so far, including ε; ``None`` without privacy.

        It is computed again at each access, which takes up to a second.
        """
        return load_spending(self.stored)

    @property
    def data_names(self) -> DataNames:
        """The names of the classes and features in the data, if the data have names.

        ``run.data_names.class_names[k]`` is the text that label k stands for.

        Raises:
            StoreError: Their file is damaged, or cannot be read.
        """
        return load_data_names(self.path)

    @property
    def clients(self) -> "ClientMetrics":
        """What each evaluated client measured at the last evaluation, by name.

        ``run.clients["hospital-1"]["accuracy"]`` is that of the global model, and
        ``"personal_accuracy"`` that of the client's own, if it has one.

        Raises:
            StoreError: There is nothing, for example because privacy is on; the message says why.
        """
        found = load_clients(self.stored)
        if found is None:
            raise StoreError(f"{self.name}: {explain_absence(self.record)}")
        return found

    def _repr_html_(self) -> str:
        """Return the result and the curves, for a notebook."""
        from fedlearn.experiment.figures import render_svg  # noqa: PLC0415 (see `plot`)
        from fedlearn.experiment.plot import panels  # noqa: PLC0415 (see `plot`)

        record, rounds = self.record, self.history
        summary = replace(summarize(record, rounds), privacy=self.privacy)
        facts = [each for each in describe_end(summary, self.path) if each[0] != "next"]
        curves = panels([(record, rounds)])[:_CURVES_SHOWN] if rounds else ()
        drawn = (render_svg(each, inches=_CURVE_INCHES) for each in curves)
        return render_box(f"run {self.name}", render_table([], facts), "<div>", *drawn, "</div>")

    def plot(self, path: Path | str | None = None) -> Path:
        """Draw the curves as PNG and return the file; by default ``curves.png`` in its folder."""
        from fedlearn.experiment.plot import plot  # noqa: PLC0415 (matplotlib takes half a second)

        target = self.path / "curves.png" if path is None else Path(path)
        return plot([(self.record, self.history)], target)

    def report(self, path: Path | str | None = None) -> Path:
        """Write one self-contained HTML file; by default ``report.html`` in the run's folder."""
        from fedlearn.experiment.report import report  # noqa: PLC0415 (it draws, too)

        target = self.path / "report.html" if path is None else Path(path)
        return report(
            self.record,
            self.history,
            target,
            privacy=self.privacy,
            clients=load_clients(self.stored),
            data_names=self.data_names,
            statistics=self.statistics(),
        )

    def statistics(self) -> "StatisticsResult | None":
        """Return the statistics of a finished run of a plan file; ``None`` for any other run.

        Raises:
            StoreError: There is no checkpoint, or it is damaged.
        """
        if self.record.status is not RunStatus.DONE or not has_plan(self.record.config):
            return None
        from fedlearn.config.statistics import query_in  # noqa: PLC0415 (it takes torch)
        from fedlearn.experiment.statistics_result import result_of  # noqa: PLC0415 (likewise)

        return result_of(self.stored, query_in(self.record.config))

    def weights(self, *, best: bool = True) -> "dict[str, Tensor]":
        """Return the tensors of the best model, or of the last.

        They are in the order of the network's ``state_dict`` if ``make_model`` is known; otherwise
        all parameters come before all buffers.

        Raises:
            StoreError: There is no checkpoint, it is damaged, or the run trained no model.
        """
        found = self.stored.weights(best=best)
        if self.make_model is None:
            return found
        import torch  # noqa: PLC0415 (see above)

        from fedlearn.training.keyed_dropout import preserve_generator  # noqa: PLC0415 (likewise)

        # Building a network draws its initial weights; the caller's random numbers must not
        # change.
        with preserve_generator(torch.default_generator):
            places = {name: place for place, name in enumerate(self.make_model().state_dict())}
        return dict(sorted(found.items(), key=lambda item: places.get(item[0], len(places))))

    def state(self) -> "dict[str, Tensor]":
        """Return the state of the strategy after the last round; of a query, its result.

        Raises:
            StoreError: There is no checkpoint, or it is damaged.
        """
        return self.stored.state_tensors()

    def client_state(self, client_id: int) -> "dict[str, Tensor]":
        """Return the state that a simulated client keeps between its rounds; {} if none.

        Each is one vector, as the local update declares it; ``local`` has the parts of the model
        that stay local, in the order of the network's parameters and then its buffers. A deployed
        run has no client state: it stays on the clients.

        Raises:
            StoreError: There is no checkpoint, or it is damaged.
        """
        from fedlearn.algorithms.client_state import from_tensors  # noqa: PLC0415 (it takes torch)

        return dict(from_tensors(self.stored.client_tensors()).get(client_id, {}))

    def load_model(
        self, make_model: "Callable[[], nn.Module] | None" = None, *, best: bool = True
    ) -> "nn.Module":
        """Return the trained network in evaluation mode: the best, or the last.

        Raises:
            ConfigError: No function builds the network, or the function holds a network that cannot
                be copied.
            ValueError: The network is not the one that was trained.
        """
        from fedlearn.core.model_factory import ModelFactory  # noqa: PLC0415 (it takes torch)
        from fedlearn.core.params import Params  # noqa: PLC0415 (likewise)

        build = make_model or self.make_model
        if build is None:
            raise ConfigError(f"{self.name}: pass make_model, the function that builds the network")
        model, weights = ModelFactory.of(build)(), self.weights(best=best)
        like = Params.of(model)
        missing = sorted((like.to_tensors().keys() | like.layout.aliases.keys()) ^ weights.keys())
        if missing:
            raise ValueError(f"the network and the weights of {self.name} differ in {missing[:3]}")
        constants = {name: weights[name] for name in like.constants}
        Params(like.layout, like.layout.pack(weights), constants).load_into(model)
        return model.eval()


def begin(record: RunRecord, database: Database, *, seed: int) -> StoredRun:
    """Create the run of ``record`` in the database; if it has no name, one is drawn.

    Raises:
        StoreError: The name is taken, or the run cannot be written.
    """
    if record.name:
        return database.create(record)
    from fedlearn.core.randomness import Seed  # noqa: PLC0415 (it takes torch)

    # From the time as well: two runs of one seed get different names.
    return database.create_named(record, seed=Seed(seed).derive(record.created_utc))
