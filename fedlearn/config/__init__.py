"""One tree that says everything about a run, and the only place with defaults.

The default tree *is* the main job: ``fedlearn simulate`` without arguments. A TOML file and
``--set a.b=c`` overrides are laid over it and validated together; every problem is reported
at once, each with its file and line. Addresses and passwords come from the environment
(:func:`resolve_addresses`) and are never part of the tree.

The names are imported when they are first used: what operators need of a configuration
(:func:`load_served`) does not wait for torch, which the whole tree does.
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
    from fedlearn.config.served import Served as Served
    from fedlearn.config.served import load_served as load_served
    from fedlearn.config.tree import Config as Config
    from fedlearn.config.tree import config_hash as config_hash

#: Names by the module that each is imported from, at its first use.
_HOME = {
    "addresses": "Addresses resolve_addresses",
    "client": "ClientConfig load_client",
    "files": "from_mapping load render",
    "section": "Section",
    "served": "Served load_served",
    "tree": "Config config_hash",
}

__all__ = [name for names in _HOME.values() for name in names.split()]


def __getattr__(name: str) -> Any:  # Any: the type of a name is declared above
    for module, names in _HOME.items():
        if name in names.split():
            return getattr(importlib.import_module(f"fedlearn.config.{module}"), name)
    raise AttributeError(f"module 'fedlearn.config' has no attribute {name!r}")
