"""A Flower federation as a channel: our messages through a stock SuperLink and stock SuperNodes.

The coordinator's side is :class:`FlowerChannel`, created from the :class:`Federation` that
:func:`server_app` provides; the client's side is :func:`client_app`. Flower transports bytes: a
message is a small record of headers and one array, the encoded request or reply. Each side also
works with apps written for Flower alone, without secure aggregation: :class:`StockChannel` with
other ClientApps, :func:`client_app` with Flower's own strategies.

Flower answers each message in a fresh process, so the state of a client, including its private key,
is stored in its ``Context.state``, unless its node is configured with a folder for it
(``identity="/path"``): :mod:`fedlearn.transport.flower.node_store`.

Guarantees:
    Between fedlearn's two sides a reply counts only if it is signed, for this run, round, attempt
    and exchange, by the key that the client showed first in this run. An attacker who controls the
    SuperLink, or who takes part under a client id before its owner does, can show another key: on
    first use there is nothing to compare with. A node that was restarted without an identity folder
    has lost its key and is refused for the rest of the run. Apps written for Flower alone sign
    nothing: there, the SuperLink's word for the sender of a reply is trusted.

References:
    `Flower 1.41 <https://flower.ai/docs/framework/>`_; its public names only.
"""

from flwr.clientapp import ClientApp
from flwr.serverapp import ServerApp

from fedlearn.transport.flower.channel import Federation, FlowerChannel, server_app
from fedlearn.transport.flower.legacy_records import LegacyRecords
from fedlearn.transport.flower.node import Answer, Keys, Mod, Node, client_app
from fedlearn.transport.flower.postbox import ChannelCounts, MessageGrid, start_thread
from fedlearn.transport.flower.stock_channel import StockChannel
from fedlearn.transport.flower.stock_records import StockRecords

__all__ = [
    "Answer",
    "ChannelCounts",
    "ClientApp",
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
    "server_app",
    "start_thread",
]
