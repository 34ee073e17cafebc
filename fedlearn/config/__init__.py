"""One tree that says everything about a run, and the only place with defaults.

The default tree *is* the main job: ``fedlearn simulate`` without arguments. A TOML file and
``--set a.b=c`` overrides are laid over it and validated together; every problem is reported
at once, each with its file and line. Addresses and passwords come from the environment
(:func:`resolve_addresses`) and are never part of the tree.
"""

from fedlearn.config.addresses import Addresses, resolve_addresses
from fedlearn.config.client import ClientConfig, load_client
from fedlearn.config.files import from_mapping, load, render
from fedlearn.config.section import Section
from fedlearn.config.template import template
from fedlearn.config.tree import Config, config_hash

__all__ = [
    "Addresses",
    "ClientConfig",
    "Config",
    "Section",
    "config_hash",
    "from_mapping",
    "load",
    "load_client",
    "render",
    "resolve_addresses",
    "template",
]
