"""Name and version of this fedlearn release, as shown to peers and operators."""

from importlib.metadata import version

SOFTWARE = f"fedlearn {version('fedlearn')}"
