"""A mod of the app: it logs what the ClientApp measures."""

import json
from collections.abc import Callable
from pathlib import Path

from flwr.app import Context, Message

#: The log file, in the folder of the node.
HISTORY = Path("history.jsonl")


def history_mod(
    msg: Message, context: Context, call_next: Callable[[Message, Context], Message]
) -> Message:
    """Log the metrics of a reply under the round of its message."""
    server_round = msg.content.config_records["config"]["server-round"]
    reply = call_next(msg, context)
    if reply.has_content():
        line = {
            "round": server_round,
            "kind": msg.metadata.message_type,
            **reply.content.metric_records["metrics"],
        }
        with HISTORY.open("a") as file:
            file.write(json.dumps(line) + "\n")
    return reply
