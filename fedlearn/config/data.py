"""Configuration of the data: where examples come from, and how clients share them."""

from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field

from fedlearn.config.components import (
    DeclaredSection,
    build_component,
    find_problem,
    kind,
    kinds,
)
from fedlearn.config.own_functions import (
    OwnFunctionSection,
    bind_own_function,
    wrong_return_error,
)
from fedlearn.config.section import (
    Arrays,
    Columns,
    Fraction,
    MissingValues,
    Names,
    PathText,
    Problem,
)
from fedlearn.config.tables import Use
from fedlearn.config.toml import quote
from fedlearn.core.randomness import Seed
from fedlearn.errors import ConfigError, DataError
from fedlearn.simulation import sources
from fedlearn.simulation.columns import ColumnRoles
from fedlearn.simulation.feature_shift import (
    AffineShift,
    FeatureShift,
    NoiseShift,
    RotationShift,
)
from fedlearn.simulation.federated_data import (
    Bootstrap,
    FederatedData,
    Natural,
    from_examples,
    from_npz,
    from_parquet,
)
from fedlearn.simulation.partition import (
    Dirichlet,
    DirichletSizes,
    FewClasses,
    Iid,
    LognormalSizes,
    Shards,
)
from fedlearn.simulation.readers import from_csv
from fedlearn.training.csv_columns import CsvFormat


class PartitionSection(DeclaredSection):
    """How the training examples are divided among clients."""

    kind: str = Field(description="How the examples are divided.")


PARTITIONS = kinds(
    "kind",
    PartitionSection,
    kind(
        "iid",
        "Shuffle the examples and deal them out: sizes differ by one at most.",
        Iid,
        num_clients=50,
    ),
    kind(
        "dirichlet",
        "Label skew: each class is dealt out in proportions drawn from a Dirichlet.",
        Dirichlet,
        num_clients=50,
        alpha=0.3,
        min_examples=5,
    ),
    kind(
        "shards",
        "Sort by label, cut into shards, deal each client a few: at most a few labels each.",
        Shards,
        num_clients=50,
        shards_per_client=2,
    ),
    kind(
        "few_classes",
        "Label skew: each client has the same number of classes, whose examples it shares.",
        FewClasses,
        num_clients=50,
        classes_per_client=2,
    ),
    kind(
        "dirichlet_sizes",
        "Quantity skew: random examples, and sizes drawn from a Dirichlet.",
        DirichletSizes,
        num_clients=50,
        alpha=0.5,
        min_examples=5,
    ),
    kind(
        "lognormal_sizes",
        "Quantity skew: random examples, and lognormal sizes.",
        LognormalSizes,
        num_clients=50,
        sigma=1.0,
        min_examples=5,
    ),
    kind(
        "natural", "Clients are the groups of the examples: a writer, a user, a hospital.", Natural
    ),
    kind(
        "bootstrap",
        "Virtual clients that draw their examples with replacement: populations of any size.",
        Bootstrap,
        num_clients=50,
        examples_per_client=50,
    ),
)
_NO_GROUPS = 'or set data.partition.kind to another, such as "iid" or "dirichlet"'


class ShiftSection(DeclaredSection):
    """How the features of simulated clients differ; the central test set stays as it is."""

    kind: str = Field(description="How the clients' features differ.")

    def build_shift(self) -> FeatureShift | None:
        """Build the shift; ``None``: there is none."""
        made: FeatureShift = self.build()
        return made


class NoShiftSection(ShiftSection):
    """The features stay as they are."""

    def build_shift(self) -> FeatureShift | None:
        """Return ``None``."""
        return None


SHIFTS = kinds(
    "kind",
    ShiftSection,
    kind("none", "The features stay as they are.", NoShiftSection),
    kind(
        "rotation",
        "Each client's images are rotated by one of a few angles.",
        RotationShift,
        angles=(0.0, 90.0, 180.0, 270.0),
    ),
    kind(
        "noise",
        "Gaussian noise, from none at the first client to most at the last.",
        NoiseShift,
        std=0.1,
    ),
    kind(
        "affine",
        "Each client's columns are scaled and shifted, as by other calibrations.",
        AffineShift,
        scale=0.1,
        offset=0.5,
    ),
)


class DataSection(DeclaredSection):
    """Where the examples come from, and how they are divided among clients."""

    source: str = Field(description="Where the examples come from.")
    shift: Annotated[ShiftSection, SHIFTS, Use.SIMULATED] = SHIFTS.of("none")

    def load_clients(self, *, seed: int, data_dir: Path) -> FederatedData:
        """Load the clients' examples, shifted if that is configured, and the test set.

        The arguments and errors are those of :meth:`load`.
        """
        data, shift = self.load(seed=seed, data_dir=data_dir), self.shift.build_shift()
        return data if shift is None else data.with_feature_shift(shift, seed=seed)

    def load(self, *, seed: int, data_dir: Path) -> FederatedData:
        """Load the clients' examples as they are, and the test set.

        Args:
            seed: Seed of the partition and of a random test set.
            data_dir: Directory of data files whose path is not configured.

        Raises:
            ConfigError: The data cannot be divided like this, or a factory does not return data.
            DataError: Data are missing or cannot be trained on.
        """
        raise NotImplementedError


class _PartitionedSection(DataSection):
    partition: Annotated[PartitionSection, PARTITIONS] = PARTITIONS.of("natural")


class DigitsSection(_PartitionedSection):
    """The 1,797 real 8 x 8 digits inside scikit-learn."""

    test_fraction: Fraction = Field(
        0.2, description="Share of the examples held out for the central test, (0, 1)."
    )

    def problems(self) -> Iterator[Problem]:
        """Refuse a natural partition: the writers of these digits are not recorded."""
        if self.partition.kind == "natural":
            text = 'the digits have no natural clients; take data.source = "mnist-by-writer", '
            yield Problem(("partition.kind", "source"), f'"natural": {text}{_NO_GROUPS}')

    def load(self, *, seed: int, data_dir: Path) -> FederatedData:
        """Return the clients and the test set."""
        digits = sources.digits(test_fraction=self.test_fraction, seed=Seed(seed).derive("data"))
        return from_examples(digits, partition=self.partition.build(), seed=seed)


class MnistByWriterSection(DataSection):
    """MNIST with one client per writer: 539 training writers, none of them in the test set."""

    path: PathText | None = Field(
        None, description="The npz file; without it, mnist.npz in the data directory."
    )

    def load(self, *, seed: int, data_dir: Path) -> FederatedData:
        """Return the clients and the test set."""
        mnist = sources.mnist_by_writer(Path(self.path or data_dir / "mnist.npz"))
        return from_examples(mnist, partition=Natural(), seed=seed)


class NpzSection(_PartitionedSection):
    """Arrays in a numpy npz file."""

    path: PathText = Field(description="The npz file.")
    features: Arrays = Field(
        "x",
        description="Name of the training features: first axis examples. Several names are several "
        "inputs of the model: an array of them its positional arguments, a table its keyword "
        "arguments.",
    )
    labels: str = Field("y", description="Name of the training labels.")
    groups: str | None = Field(
        None, description="Name of an array with each training example's client id."
    )
    test_features: Arrays | None = Field(
        None, description="Name of the test features, or of each input's."
    )
    test_labels: str | None = Field(None, description="Name of the test labels.")
    test_groups: str | None = Field(
        None,
        description="Name of an array with each test example's client id: each client is then "
        "evaluated on its own.",
    )
    test_fraction: Fraction | None = Field(
        None, description="Share of the examples held out where there are no test arrays, (0, 1)."
    )

    def problems(self) -> Iterator[Problem]:
        """Require exactly one kind of test set, and groups for a natural partition."""
        arrays = (self.test_features is not None, self.test_labels is not None)
        if any(arrays) != all(arrays):
            given, lacking = ("features", "labels") if arrays[0] else ("labels", "features")
            text = f"is given without test_{lacking}; name both arrays"
            yield Problem((f"test_{given}",), text)
        elif any(arrays) and self.test_fraction is not None:
            text = f"is {self.test_fraction}, but there are test arrays; remove one of the two"
            yield Problem(("test_fraction", "test_features"), text)
        elif not any(arrays) and self.test_fraction is None:
            text = "there is no test set; set test_features and test_labels, or test_fraction"
            yield Problem(("test_fraction", "source"), text)
        if self.test_groups is not None:
            yield from self._check_test_groups()
        if self.partition.kind == "natural" and self.groups is None:
            text = f'"natural" needs client ids; name their array in data.groups, {_NO_GROUPS}'
            yield Problem(("partition.kind", "source"), text)

    def _check_test_groups(self) -> Iterator[Problem]:
        if self.partition.kind != "natural":
            text = f'is "{self.test_groups}", but the clients have no names; set '
            yield Problem(("test_groups", "partition.kind"), f'{text}data.partition.kind="natural"')
        elif self.test_features is None:
            text = f'is "{self.test_groups}", but there are no test arrays; name them, or set '
            yield Problem(
                ("test_groups", "test_features"),
                f"{text}evaluation.client_test_fraction instead",
            )

    def load(self, *, seed: int, data_dir: Path) -> FederatedData:
        """Return the clients and the test set."""
        arrays = (self.test_features, self.test_labels)
        test = self.test_fraction if None in arrays else arrays
        return build_component(
            from_npz, self, test=test, partition=self.partition.build(), seed=seed
        )


class ParquetSection(_PartitionedSection):
    """Columns of Parquet files; they may be larger than memory."""

    path: PathText = Field(description="The training file, or a directory of them.")
    test_path: PathText = Field(description="The test file, or a directory of them.")
    client_column: str | None = Field(None, description="Column with each row's client id.")
    test_client_column: str | None = Field(
        None,
        description="Column of the test file with each row's client id: each client is then "
        "evaluated on its own rows.",
    )
    label_column: str = Field("label", description="Column with the labels.")
    feature_columns: Columns | Literal["all"] = Field(
        "all",
        description='Columns with the features, side by side; "all" takes those with no other '
        "role. Several arrays of them are several inputs of the model: an array of arrays its "
        "positional arguments, a table its keyword arguments.",
    )

    def problems(self) -> Iterator[Problem]:
        """Require a client column for a natural partition, and one role per column."""
        if self.partition.kind == "natural" and self.client_column is None:
            text = f'"natural" needs client ids; name data.client_column, {_NO_GROUPS}'
            yield Problem(("partition.kind", "source"), text)
        taken = {self.label_column, self.client_column} - {None}
        twice = [column for column in self._list_columns() if column in taken]
        if twice:
            text = f"has {quote(twice)}, which are labels or client ids; remove them"
            yield Problem(("feature_columns",), text)

    def _list_columns(self) -> Iterator[str]:
        if self.feature_columns != "all":
            columns = self.feature_columns
            for each in columns.values() if isinstance(columns, dict) else columns:
                yield from [each] if isinstance(each, str) else each

    def load(self, *, seed: int, data_dir: Path) -> FederatedData:
        """Return the clients and the test set."""
        if self.partition.kind != "natural":
            raise ConfigError(
                f'data.partition.kind is "{self.partition.kind}", but streaming Parquet is divided '
                'by its client column; set it to "natural" and name data.client_column'
            )
        assert self.client_column is not None  # required of a natural partition
        return from_parquet(
            self.path,
            test_path=self.test_path,
            client=self.client_column,
            label=self.label_column,
            features=None if self.feature_columns == "all" else self.feature_columns,
            test_client=self.test_client_column,
        )


class CsvSection(_PartitionedSection):
    """CSV files: a folder with one for each client, or one with a client column."""

    path: PathText = Field(description="A folder with a file for each client, or one file.")
    label_column: str = Field("label", description="Column with the labels; texts are classes.")
    feature_columns: Names | Literal["all"] = Field(
        "all", description='Columns with the features; "all" takes numbers with no other role.'
    )
    exclude: Names = Field(
        (), description='Columns that are no features, with feature_columns = "all".'
    )
    one_hot: Names = Field(
        (), description="Columns of categories, each of which becomes a feature that is 0 or 1."
    )
    missing: MissingValues = Field(
        "error",
        description='What is done with a missing value: "error", "drop" leaves its row out, or a '
        "value to fill in, also by column.",
    )
    regression: bool = Field(
        False, description="Whether to regress on labels that are whole numbers."
    )
    standardize: bool = Field(
        False,
        description="Whether features are scaled to mean 0 and standard deviation 1 over the "
        "training rows of all clients, columns of only 0 and 1 excepted.",
    )
    client_column: str | None = Field(
        None, description="Column with each row's client; without it, each file is a client."
    )
    test_path: PathText | None = Field(
        None,
        description="The test file, or a folder with one for each client, which is then evaluated "
        "on its own.",
    )
    test_fraction: Fraction | None = Field(
        None, description="Share of the rows held out where there is no test file, (0, 1)."
    )

    def problems(self) -> Iterator[Problem]:
        """Require exactly one kind of test set, roles that go together, and a possible format."""
        if self.test_path is not None and self.test_fraction is not None:
            text = f"is {self.test_fraction}, but there is a test file; remove one of the two"
            yield Problem(("test_fraction", "test_path"), text)
        elif self.test_path is None and self.test_fraction is None:
            text = "there is no test set; set test_path or test_fraction"
            yield Problem(("test_fraction", "source"), text)
        yield from find_problem(self._csv_format)
        try:
            self._roles()
        except DataError as error:
            yield Problem(("label_column",), str(error))

    def _csv_format(self) -> CsvFormat:
        return build_component(CsvFormat, self)

    def _roles(self) -> ColumnRoles:
        return build_component(
            ColumnRoles,
            self,
            label=self.label_column,
            features=None if self.feature_columns == "all" else self.feature_columns,
        )

    def load(self, *, seed: int, data_dir: Path) -> FederatedData:
        """Return the clients and the test set."""
        roles, test = self._roles(), self.test_path or self.test_fraction
        assert test is not None  # required above
        return from_csv(
            self.path,
            label=roles.label,
            test=test,
            seed=seed,
            features=roles.features,
            exclude=roles.exclude,
            one_hot=roles.one_hot,
            missing=roles.missing,
            regression=roles.regression,
            standardize=roles.standardize,
            client=self.client_column,
            partition=None if self.partition.kind == "natural" else self.partition.build(),
            csv_format=self._csv_format(),
        )


class PythonDataSection(OwnFunctionSection, _PartitionedSection):
    """A data set that a function of yours returns."""

    def load(self, *, seed: int, data_dir: Path) -> FederatedData:
        """Return the clients and the test set."""
        made = bind_own_function("data.factory", self.factory, self.args)()
        if isinstance(made, sources.TrainTest):
            return from_examples(made, partition=self.partition.build(), seed=seed)
        if not isinstance(made, FederatedData):
            raise wrong_return_error(
                "data.factory", self.factory, made, "FederatedData or TrainTest"
            )
        if self.partition.kind != "natural":
            raise ConfigError(
                f'data.partition.kind is "{self.partition.kind}", but {self.factory} returned '
                "FederatedData, which is divided already; remove data.partition, or return "
                "TrainTest"
            )
        return made


class NoDataSection(DataSection):
    """No examples at the coordinator: a deployment in which clients evaluate as well."""

    def load(self, *, seed: int, data_dir: Path) -> FederatedData:
        """Raise ConfigError: there are no examples to simulate."""
        raise ConfigError(
            'data.source is "none", which is for a coordinator whose clients have all the '
            "data; name the data to simulate, as with --set data.source=digits"
        )


DATA = kinds(
    "source",
    DataSection,
    kind(
        "digits",
        "The 1,797 real 8 x 8 digits inside scikit-learn.",
        DigitsSection,
        partition=PARTITIONS.of("dirichlet"),
    ),
    kind(
        "mnist-by-writer",
        "MNIST with one client per writer: 539 training writers, none of them in the test set.",
        MnistByWriterSection,
    ),
    kind("npz", "Arrays in a numpy npz file.", NpzSection),
    kind("parquet", "Columns of Parquet files; they may be larger than memory.", ParquetSection),
    kind(
        "csv",
        "CSV files: a folder with one for each client, or one with a client column.",
        CsvSection,
        CsvFormat,
    ),
    kind("python", "A data set that a function of yours returns.", PythonDataSection),
    kind(
        "none",
        "No examples at the coordinator: a deployment whose clients evaluate, too.",
        NoDataSection,
    ),
)
