"""A Flower grid in this process: Flower's messages and ClientApps, without a SuperLink."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

from flwr.app import Context, Error, Message, RecordDict, UserConfig
from flwr.supercore.task_identity import TaskIdentity

from fedlearn.core.clock import VirtualClock
from fedlearn.transport.flower import FlowerChannel

#: Flower's number of the run.
RUN = 7


@dataclass
class LocalGrid:
    """Nodes whose app answers at once, in the process of the ServerApp.

    Override :meth:`answered` to make nodes slow, dead or dishonest.

    Attributes:
        clock: Decides when replies are available.
        app: Answers the messages.
        nodes: Partition by node id.
        node_config: Configuration of every node, in addition to its partition.
        run_config: Configuration of the run.
        contexts: The context that Flower stores for each node.
        pushed: Every message sent to an existing node.
        replies: Unfetched replies by message id, with the time when they are available.
    """

    clock: VirtualClock
    app: Callable[[Message, Context], Message]
    nodes: dict[int, int]
    node_config: UserConfig = field(default_factory=dict)
    run_config: UserConfig = field(default_factory=dict)
    contexts: dict[int, Context] = field(default_factory=dict)
    pushed: list[Message] = field(default_factory=list)
    replies: dict[str, tuple[float, Message]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        TaskIdentity.run_id, TaskIdentity.node_id, TaskIdentity.task_id = RUN, 1, 1

    def get_node_ids(self) -> Iterable[int]:
        return list(self.nodes)

    def push_messages(self, messages: Iterable[Message]) -> Sequence[str]:
        return [self._push(message) for message in messages]

    def pull_messages(self, message_ids: Iterable[str]) -> Iterable[Message]:
        now_s = self.clock.now_s()
        ready = [each for each in message_ids if self.replies[each][0] <= now_s]
        return [self.replies.pop(each)[1] for each in ready]

    def context(self, node_id: int) -> Context:
        """Return the context that Flower passes to the app with a message to a node."""
        config = self.config_of(self.nodes[node_id])
        fresh = Context(RUN, node_id, config, RecordDict(), self.run_config)
        return self.contexts.setdefault(node_id, fresh)

    def config_of(self, client: int) -> UserConfig:
        """Return the configuration of a client's node."""
        return {"partition-id": client, **self.node_config}

    def answered(self, client: int, message: Message) -> tuple[float, Message]:
        """Return a client's delay in seconds and its answer; Flower's error if the app raises."""
        try:
            return 0.0, self.app(message, self.context(message.metadata.dst_node_id))
        except Exception as error:  # noqa: BLE001 - whatever a foreign app raises
            reason = f"{type(error)}:<'{error}'>"  # Flower's format
            return 0.0, Message(Error(2, reason), reply_to=message)

    def _push(self, message: Message) -> str:
        node_id = message.metadata.dst_node_id
        if node_id not in self.nodes:
            return ""
        self.pushed.append(message)
        message_id = f"message-{len(self.pushed)}"
        message.metadata.__dict__["_message_id"] = message_id
        latency_s, reply = self.answered(self.nodes[node_id], message)
        self.replies[message_id] = (self.clock.now_s() + latency_s, reply)
        return message_id


class StockGrid(LocalGrid):
    """A grid that runs Flower's own strategies, as Flower's grid does."""

    def send_and_receive(
        self, messages: Iterable[Message], *, timeout: float | None = None
    ) -> list[Message]:
        return list(self.pull_messages(self.push_messages(messages)))


def joined(channel: FlowerChannel, num_clients: int, *, within_s: float = 30.0) -> FlowerChannel:
    """Wait until so many clients have introduced themselves, or ``within_s`` has passed."""
    ends_s = channel.clock.now_s() + within_s
    while len(channel.available()) < num_clients and channel.clock.now_s() < ends_s:
        channel.clock.sleep(0.5)
    return channel
