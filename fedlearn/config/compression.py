"""Configuration of how updates and the model are compressed."""

from collections.abc import Iterator

from pydantic import Field

from fedlearn.algorithms.download_compression import CompressedDownload
from fedlearn.algorithms.power_sgd import PowerSgd
from fedlearn.algorithms.quantization import Quantized
from fedlearn.algorithms.random_k import RandomK, SharedRandomK
from fedlearn.algorithms.strategy import Strategy
from fedlearn.algorithms.top_k import TopK
from fedlearn.algorithms.transformed_updates import TransformedUpdates
from fedlearn.config.components import DeclaredSection, find_problem, kind, kinds
from fedlearn.config.section import Problem


class CompressionSection(DeclaredSection):
    """How clients compress their updates."""

    method: str = Field(description="How clients compress their updates.")

    def problems(self) -> Iterator[Problem]:
        """Refuse values that the method refuses."""
        yield from find_problem(self.build)

    def apply(self, strategy: Strategy) -> Strategy:
        """Return the strategy whose clients compress their updates so."""
        return TransformedUpdates(strategy, (self.build(),))


class WholeSection(CompressionSection):
    """Updates are sent whole."""

    def problems(self) -> Iterator[Problem]:
        """Refuse nothing: there are no values."""
        yield from ()

    def apply(self, strategy: Strategy) -> Strategy:
        """Return the strategy unchanged."""
        return strategy


COMPRESSIONS = kinds(
    "method",
    CompressionSection,
    kind("none", "Updates are sent whole.", WholeSection),
    kind(
        "top_k",
        "Each client sends the largest numbers of its update.",
        TopK,
        fraction=0.1,
        error_feedback=True,
    ),
    kind(
        "random_k",
        "Each client sends random numbers of its update.",
        RandomK,
        fraction=0.1,
        error_feedback=False,
    ),
    kind(
        "shared_random_k",
        "Each client sends random numbers of its update, at the same places as the others.",
        SharedRandomK,
        fraction=0.1,
        error_feedback=False,
    ),
    kind(
        "quantized",
        "Each client sends its update in 8 or 4 bits a number, rounded at random.",
        Quantized,
        error_feedback=False,
    ),
    kind(
        "power_sgd",
        "Each client sends its update as products of narrow matrices.",
        PowerSgd,
        rank=2,
        error_feedback=True,
    ),
)


class DownloadCompressionSection(DeclaredSection):
    """How the model is compressed that clients download."""

    method: str = Field(description="How the model is compressed that clients download.")

    def problems(self) -> Iterator[Problem]:
        """Refuse values that the method refuses."""
        yield from find_problem(self.build)

    def apply(self, strategy: Strategy) -> Strategy:
        """Return the strategy whose coordinator compresses the model so."""
        return CompressedDownload(strategy, self.build())


class WholeDownloadSection(DownloadCompressionSection):
    """The model is sent whole."""

    def problems(self) -> Iterator[Problem]:
        """Refuse nothing: there are no values."""
        yield from ()

    def apply(self, strategy: Strategy) -> Strategy:
        """Return the strategy unchanged."""
        return strategy


DOWNLOAD_COMPRESSIONS = kinds(
    "method",
    DownloadCompressionSection,
    kind("none", "The model is sent whole.", WholeDownloadSection),
    kind(
        "quantized",
        "The coordinator sends the model in 8 or 4 bits a number, rounded at random.",
        Quantized,
    ),
    given=("error_feedback",),
)
