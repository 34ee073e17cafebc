"""Which release of fedlearn this is, as peers and operators read it."""

from importlib.metadata import version

SOFTWARE = f"fedlearn {version('fedlearn')}"
