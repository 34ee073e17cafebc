"""The ClientApp: trains and tests on the data of its node."""

import torch
from flwr.app import ArrayRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp

from quickstart.mods import history_mod
from quickstart.task import Loader, Net, load_data, num_examples
from quickstart.task import test as test_fn
from quickstart.task import train as train_fn

app = ClientApp(mods=[history_mod])


def _given(msg: Message) -> tuple[Net, torch.device]:
    net = Net()
    net.load_state_dict(msg.content.array_records["arrays"].to_torch_state_dict())
    return net, torch.device("cuda:0" if torch.cuda.is_available() else "cpu")


def _loaders(context: Context) -> tuple[Loader, Loader]:
    partition, num_partitions = (
        int(context.node_config[name]) for name in ("partition-id", "num-partitions")
    )
    return load_data(partition, num_partitions, int(context.run_config["batch-size"]))


@app.train()
def train(msg: Message, context: Context) -> Message:
    """Train the model that was sent, at the rate that was sent."""
    net, device = _given(msg)
    loader, _ = _loaders(context)
    rate = msg.content.config_records["config"]["lr"]
    assert isinstance(rate, float)
    loss = train_fn(net, loader, int(context.run_config["local-epochs"]), rate, device)
    metrics = MetricRecord({"train_loss": loss, "num-examples": num_examples(loader)})
    content = RecordDict({"arrays": ArrayRecord(net.state_dict()), "metrics": metrics})
    return Message(content=content, reply_to=msg)


@app.evaluate()
def evaluate(msg: Message, context: Context) -> Message:
    """Test the model that was sent."""
    net, device = _given(msg)
    _, loader = _loaders(context)
    loss, accuracy = test_fn(net, loader, device)
    metrics = MetricRecord(
        {"eval_loss": loss, "eval_acc": accuracy, "num-examples": num_examples(loader)}
    )
    return Message(content=RecordDict({"metrics": metrics}), reply_to=msg)
