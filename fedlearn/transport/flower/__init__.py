"""A Flower federation as a channel: our messages through a stock SuperLink and stock SuperNodes.

The coordinator's side is :class:`FlowerChannel`, made by :class:`Federation` inside
:func:`server_app`; the client's side is :func:`client_app`. Flower moves bytes: a message is a
small record of headers and one array, the encoded request or reply. Each side also speaks with
what was written for Flower alone, without secure aggregation: :class:`StockChannel` with other
ClientApps, :func:`client_app` with Flower's own strategies.

Flower answers each message in a fresh process, so what a client remembers lies in its
``Context.state``, its private key included, unless its node is configured with a folder for it
(``identity="/path"``): :mod:`fedlearn.transport.flower.node_store`.

Guarantees:
    Between fedlearn's two sides a reply counts only if it is signed, for this run, round, attempt
    and exchange, by the key that the client showed first in this run. Who controls the SuperLink,
    or takes part under a client id before its owner does, can show a key of his own: on first use
    there is nothing to compare with. A node that was restarted without an identity folder has lost
    its key and is refused for the rest of the run. What was written for Flower alone signs
    nothing: there a reply is whose the SuperLink says that it is.

References:
    `Flower 1.41 <https://flower.ai/docs/framework/>`_; its public names only.
"""

from flwr.clientapp import ClientApp
from flwr.serverapp import ServerApp

from fedlearn.transport.flower.channel import Federation, FlowerChannel, server_app
from fedlearn.transport.flower.legacy_records import LegacyRecords
from fedlearn.transport.flower.node import Answer, Keys, Mod, Node, client_app
from fedlearn.transport.flower.postbox import Counts, MessageGrid, in_a_thread
from fedlearn.transport.flower.stock_channel import StockChannel
from fedlearn.transport.flower.stock_records import StockRecords

__all__ = [
    "Answer",
    "ClientApp",
    "Counts",
    "Federation",
    "FlowerChannel",
    "Keys",
    "LegacyRecords",
    "MessageGrid",
    "Mod",
    "Node",
    "ServerApp",
    "StockChannel",
    "StockRecords",
    "client_app",
    "in_a_thread",
    "server_app",
]
