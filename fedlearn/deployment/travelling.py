"""The files that travel with an experiment: the weights that it starts from, and its bundle.

They come as one file, the weights first. The order says how much of it is the bundle, and which
digest the bundle has.
"""

import os
from pathlib import Path
from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field, StringConstraints

from fedlearn.config.overrides import find_file
from fedlearn.config.reading import parse
from fedlearn.core.files import explain_disk_errors
from fedlearn.errors import ConfigError, DeploymentError
from fedlearn.identity.bundles import MAX_BYTES, Bundle, digest_of
from fedlearn.transport import wire


class TravellingBundle(BaseModel):
    """The bundle that comes with an order.

    Attributes:
        sha256: Its digest.
        num_bytes: Its size.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    sha256: Annotated[str, StringConstraints(pattern="^[0-9a-f]{64}$")]
    num_bytes: Annotated[int, Field(ge=1, le=MAX_BYTES)]

    @classmethod
    def of(cls, bundle: Bundle) -> "TravellingBundle":
        """Describe a bundle."""
        return cls(sha256=bundle.digest, num_bytes=len(bundle.content))

    def take_from(self, file: Path) -> Bundle:
        """Cut the bundle off the end of the file that has come, and check it.

        Raises:
            DeploymentError: It is not the one that was announced, or is not valid.
        """
        with explain_disk_errors(file, raises=DeploymentError, doing="read"), file.open("rb") as f:
            begin = os.fstat(f.fileno()).st_size - self.num_bytes
            f.seek(max(begin, 0))
            content = f.read()
        if begin < 0 or digest_of(content) != self.sha256:
            raise DeploymentError(
                f"the bundle that has come is not the one with the digest {self.sha256[:12]}…: it "
                "was cut or damaged on the way; submit it again"
            )
        with explain_disk_errors(file, raises=DeploymentError):
            os.truncate(file, begin)
        try:
            return Bundle.parse(content)
        except DeploymentError as error:
            raise DeploymentError(f"client.bundle: {error}") from error


def find_bundle(experiment: Path, toml: str, overrides: tuple[str, ...]) -> Bundle | None:
    """Read and check the bundle that an experiment of this machine names; ``None``: it names none.

    Raises:
        ConfigError: The experiment is not TOML, or the file is missing or not a signed bundle.
    """
    raw = parse(toml, source=str(experiment))
    folder = experiment.absolute().parent
    path = find_file(("client", "bundle"), raw, overrides, folder=folder)
    if path is None:
        return None
    try:
        return Bundle.load(path)
    except DeploymentError as error:
        raise ConfigError(f"client.bundle: {error}") from error


def join_files(weights: Path | None, bundle: Bundle | None) -> bytes:
    """Return the file that travels: the weights, and then the bundle.

    Raises:
        ConfigError: The weights are missing or empty, or all is too large.
    """
    most = wire.MAX_FILE_BYTES - (0 if bundle is None else len(bundle.content))
    content = b"" if weights is None else _read_weights(weights, most=most)
    return content if bundle is None else content + bundle.content


def _read_weights(path: Path, *, most: int) -> bytes:
    with explain_disk_errors(path, raises=ConfigError, doing="read"):
        num_bytes = path.stat().st_size
        content = path.read_bytes() if num_bytes <= most else b""
    if not content:
        raise ConfigError(
            f"{path} has {num_bytes} bytes; between 1 and {most} travel to a coordinator; copy a "
            "larger file to its machine, and submit the run there"
        )
    return content
