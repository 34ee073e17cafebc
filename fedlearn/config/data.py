"""The examples and whose they are: sources and partitions."""

from collections.abc import Iterator
from typing import Annotated, Literal, TypeAlias

from pydantic import Field

from fedlearn.config.section import Args, Columns, Factory, Fraction, PathText, Problem, Section
from fedlearn.config.toml import shown


class IidPartition(Section):
    """Examples are dealt out at random, in equal numbers."""

    kind: Literal["iid"] = Field("iid", description="How the examples are divided.")
    num_clients: int = Field(50, ge=1, description="Clients in the population, >= 1.")


class DirichletPartition(Section):
    """Label skew: each class is dealt out in proportions drawn from a Dirichlet."""

    kind: Literal["dirichlet"] = Field("dirichlet", description="How the examples are divided.")
    num_clients: int = Field(50, ge=1, description="Clients in the population, >= 1.")
    alpha: float = Field(
        0.3, gt=0, description="Concentration, > 0: 0.1 is strong skew, 100 nearly none."
    )
    min_examples: int = Field(
        5, ge=1, description="Fewest examples of a client, >= 1; proportions are redrawn until met."
    )


class ShardsPartition(Section):
    """Examples sorted by label and cut into shards; a client gets a few of them."""

    kind: Literal["shards"] = Field("shards", description="How the examples are divided.")
    num_clients: int = Field(50, ge=1, description="Clients in the population, >= 1.")
    shards_per_client: int = Field(2, ge=1, description="Shards a client gets, >= 1.")


class NaturalPartition(Section):
    """Examples belong to who produced them, as the data say."""

    kind: Literal["natural"] = Field("natural", description="How the examples are divided.")


class BootstrapPartition(Section):
    """Virtual clients that draw their examples with replacement: populations of any size."""

    kind: Literal["bootstrap"] = Field("bootstrap", description="How the examples are divided.")
    num_clients: int = Field(50, ge=1, description="Clients in the population, >= 1.")
    examples_per_client: int = Field(50, ge=1, description="Examples a client draws, >= 1.")


Partition: TypeAlias = Annotated[
    IidPartition | DirichletPartition | ShardsPartition | NaturalPartition | BootstrapPartition,
    Field(discriminator="kind"),
]
_NO_GROUPS = 'or set data.partition.kind to "iid", "dirichlet", "shards" or "bootstrap"'


class DigitsData(Section):
    """The 1,797 real 8 x 8 digits inside scikit-learn."""

    source: Literal["digits"] = Field("digits", description="Where the examples come from.")
    test_fraction: float = Field(
        0.2, gt=0, lt=1, description="Share of the examples held out for the central test, (0, 1)."
    )
    partition: Partition = Field(
        DirichletPartition(), description="How the training examples are divided among clients."
    )

    def problems(self) -> Iterator[Problem]:
        """Refuse a natural partition: nobody knows who wrote these digits."""
        if isinstance(self.partition, NaturalPartition):
            text = 'the digits have no natural clients; take data.source = "mnist-by-writer", '
            yield Problem(("partition.kind", "source"), f'"natural": {text}{_NO_GROUPS}')


class MnistByWriterData(Section):
    """MNIST with one client per writer: 539 training writers, none of them in the test set."""

    source: Literal["mnist-by-writer"] = Field(
        "mnist-by-writer", description="Where the examples come from."
    )
    path: PathText | None = Field(
        None, description="The npz file; without it, mnist.npz in the data directory."
    )


class NpzData(Section):
    """Arrays in a numpy npz file."""

    source: Literal["npz"] = Field("npz", description="Where the examples come from.")
    path: PathText = Field(description="The npz file.")
    features: str = Field("x", description="Name of the training features: first axis examples.")
    labels: str = Field("y", description="Name of the training labels.")
    groups: str | None = Field(
        None, description="Name of an array with each training example's client id."
    )
    test_features: str | None = Field(None, description="Name of the test features.")
    test_labels: str | None = Field(None, description="Name of the test labels.")
    test_fraction: Fraction | None = Field(
        None, description="Share of the examples held out where there are no test arrays, (0, 1)."
    )
    partition: Partition = Field(
        NaturalPartition(), description="How the training examples are divided among clients."
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
        if isinstance(self.partition, NaturalPartition) and self.groups is None:
            text = f'"natural" needs client ids; name their array in data.groups, {_NO_GROUPS}'
            yield Problem(("partition.kind", "source"), text)


class ParquetData(Section):
    """Columns of Parquet files; they may be larger than memory."""

    source: Literal["parquet"] = Field("parquet", description="Where the examples come from.")
    path: PathText = Field(description="The training file, or a directory of them.")
    test_path: PathText = Field(description="The test file, or a directory of them.")
    client_column: str | None = Field(None, description="Column with each row's client id.")
    label_column: str = Field("label", description="Column with the labels.")
    feature_columns: Columns | Literal["all"] = Field(
        "all", description='Columns with the features; "all" takes those with no other role.'
    )
    partition: Partition = Field(
        NaturalPartition(), description="How the training examples are divided among clients."
    )

    def problems(self) -> Iterator[Problem]:
        """Require a client column for a natural partition, and one role a column."""
        if isinstance(self.partition, NaturalPartition) and self.client_column is None:
            text = f'"natural" needs client ids; name data.client_column, {_NO_GROUPS}'
            yield Problem(("partition.kind", "source"), text)
        taken = {self.label_column, self.client_column} - {None}
        twice = [column for column in self.feature_columns if column in taken]
        if self.feature_columns != "all" and twice:
            text = f"has {shown(twice)}, which are labels or client ids; remove them"
            yield Problem(("feature_columns",), text)


class PythonData(Section):
    """A data set that a function of yours returns."""

    source: Literal["python"] = Field("python", description="Where the examples come from.")
    factory: Factory = Field(
        description='The function: "module:function" or "path/to/file.py:function".'
    )
    args: Args = Field({}, description="Keyword arguments of the function.")
    partition: Partition = Field(
        NaturalPartition(), description="How the training examples are divided among clients."
    )


class NoData(Section):
    """No examples at the coordinator: a deployment whose clients evaluate, too."""

    source: Literal["none"] = Field("none", description="Where the examples come from.")


Data: TypeAlias = Annotated[
    DigitsData | MnistByWriterData | NpzData | ParquetData | PythonData | NoData,
    Field(discriminator="source"),
]
