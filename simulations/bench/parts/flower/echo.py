"""A Flower app whose nodes answer each message at once, so all time spent is Flower's own."""

import json
from pathlib import Path
from time import perf_counter, sleep  # noqa: TID251 - runs where fedlearn need not be

import numpy as np
from flwr.app import Array, ArrayRecord, Context, Message, MessageType, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp import Grid, ServerApp

#: Seconds between two pulls; Flower's own loop waits 3.
_PULL_S = 0.1

client = ClientApp()
server = ServerApp()


@client.train()
def answer(message: Message, _: Context) -> Message:
    """Send the message's content back."""
    return Message(message.content, reply_to=message)


@server.main()
def main(grid: Grid, context: Context) -> None:
    """Run the rounds and write the seconds of each."""
    config = context.run_config
    nodes = _nodes(grid, int(config["num-nodes"]))
    weights = np.zeros(int(config["size"]), np.float32)
    content = RecordDict({"weights": ArrayRecord({"0": Array(weights)})})
    seconds = []
    for _ in range(int(config["num-rounds"])):
        started_s = perf_counter()
        _exchange(grid, [Message(content, node, MessageType.TRAIN) for node in nodes])
        seconds.append(perf_counter() - started_s)
    Path(str(config["result"])).write_text(json.dumps(seconds))


def _nodes(grid: Grid, num: int) -> list[int]:
    """Wait until ``num`` nodes are connected, and return their ids."""
    while len(nodes := list(grid.get_node_ids())) < num:
        sleep(_PULL_S)
    return nodes[:num]


def _exchange(grid: Grid, messages: list[Message]) -> None:
    """Push all messages, and pull until all are answered."""
    missing = set(grid.push_messages(messages))
    while missing:
        replies = list(grid.pull_messages(missing))
        for reply in replies:
            reply.content  # noqa: B018 - raises if the node has failed
        missing -= {reply.metadata.reply_to_message_id for reply in replies}
        if missing:
            sleep(_PULL_S)
