"""The configuration of a run: one tree of tables, and the only place with defaults.

The default tree is what ``fedlearn simulate`` runs without arguments. A TOML file and then
``--set a.b=c`` overrides are merged over it and validated together; every problem is reported at
once, each with its file and line. Passwords come from the environment (:func:`resolve_addresses`)
and are never part of the tree.

Names are imported on first use. The whole tree imports torch; commands for operators, which need
only :func:`load_serving`, should not wait for that.
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from fedlearn.config.addresses import Addresses as Addresses
    from fedlearn.config.addresses import resolve_addresses as resolve_addresses
    from fedlearn.config.client import ClientConfig as ClientConfig
    from fedlearn.config.client import load_client as load_client
    from fedlearn.config.files import from_mapping as from_mapping
    from fedlearn.config.files import load as load
    from fedlearn.config.files import render as render
    from fedlearn.config.section import Section as Section
    from fedlearn.config.serving import ServiceConfig as ServiceConfig
    from fedlearn.config.serving import ServingConfig as ServingConfig
    from fedlearn.config.serving import load_service as load_service
    from fedlearn.config.serving import load_serving as load_serving
    from fedlearn.config.submitted import for_service as for_service
    from fedlearn.config.tree import Config as Config
    from fedlearn.config.tree import config_hash as config_hash

#: The public names of each submodule.
_HOME = {
    "addresses": "Addresses resolve_addresses",
    "client": "ClientConfig load_client",
    "files": "from_mapping load render",
    "section": "Section",
    "serving": "ServiceConfig ServingConfig load_service load_serving",
    "submitted": "for_service",
    "tree": "Config config_hash",
}

__all__ = [name for names in _HOME.values() for name in names.split()]


def __getattr__(name: str) -> Any:  # Any: the type of a name is declared above
    for module, names in _HOME.items():
        if name in names.split():
            return getattr(importlib.import_module(f"fedlearn.config.{module}"), name)
    raise AttributeError(f"module 'fedlearn.config' has no attribute {name!r}")
