"""Folders, keys and bundles for tests."""

from pathlib import Path

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from fedlearn.identity.bundle_folder import make_bundle
from fedlearn.identity.bundles import Bundle
from fedlearn.identity.signing import ResearcherKey

#: The key of the tests' researcher.
RESEARCHER = ResearcherKey(Ed25519PrivateKey.from_private_bytes(bytes(range(32))))
#: The key of somebody else.
STRANGER = ResearcherKey(Ed25519PrivateKey.from_private_bytes(bytes(32)))
SIGNER = RESEARCHER.public_key.hex()

_DESCRIPTION = """\
name = "tumours"
version = "{version}"
entry_point = "trainer:Trainer"
parameters = ["parameters.toml"]
requirements = "requirements.lock"
"""


def write_folder(
    folder: Path,
    *,
    code: str = "class Trainer: ...\n",
    parameters: str = "width = 8\n",
    requirements: str = "",
    version: str = "1.0",
) -> Path:
    """Write the folder of a trainer, and return it."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "bundle.toml").write_text(_DESCRIPTION.format(version=version))
    (folder / "trainer.py").write_text(code)
    (folder / "parameters.toml").write_text(parameters)
    (folder / "requirements.lock").write_text(requirements)
    return folder


def build(
    folder: Path,
    key: ResearcherKey = RESEARCHER,
    *,
    code: str = "class Trainer: ...\n",
    parameters: str = "width = 8\n",
    requirements: str = "",
    version: str = "1.0",
) -> Bundle:
    """Build a bundle with this content."""
    written = write_folder(
        folder, code=code, parameters=parameters, requirements=requirements, version=version
    )
    return make_bundle(written, key)
