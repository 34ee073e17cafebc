"""A network for rows of a table, with one probability per example."""

import torch
from flwr.app import ArrayRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from shapes.rows import blobs, split_of


class Classifier(nn.Module):
    """Two layers and a sigmoid."""

    def __init__(self) -> None:
        super().__init__()
        self.hidden = nn.Linear(6, 16)
        self.output = nn.Linear(16, 1)

    def forward(self, x: Tensor) -> Tensor:
        """Return a probability for each row."""
        return torch.sigmoid(self.output(torch.relu(self.hidden(x))))


def make_model() -> nn.Module:
    """Build the network, with the same initial weights in every process."""
    with torch.random.fork_rng():
        torch.manual_seed(1)
        return Classifier()


app = ClientApp()


def _given(msg: Message) -> nn.Module:
    net = Classifier()
    net.load_state_dict(msg.content.array_records["arrays"].to_torch_state_dict())
    return net


def _loader(context: Context, *, trains: bool) -> DataLoader[tuple[Tensor, ...]]:
    x_train, y_train, x_test, y_test = split_of(*blobs(6), context)
    x, y = (x_train, y_train) if trains else (x_test, y_test)
    columns = torch.tensor(x).float(), torch.tensor(y).float().view(-1, 1)
    order = torch.Generator().manual_seed(0)
    return DataLoader(TensorDataset(*columns), batch_size=16, shuffle=trains, generator=order)


@app.train()
def train(msg: Message, context: Context) -> Message:
    """Train with Adam; as weight, report the number of batches."""
    net, loader, loss_of = _given(msg), _loader(context, trains=True), nn.BCELoss()
    optimizer = torch.optim.Adam(net.parameters(), lr=0.01)
    for x, y in loader:
        optimizer.zero_grad()
        loss_of(net(x), y).backward()
        optimizer.step()
    content = RecordDict(
        {
            "arrays": ArrayRecord(net.state_dict()),
            "metrics": MetricRecord({"num-examples": len(loader)}),
        }
    )
    return Message(content, reply_to=msg)


@app.evaluate()
def evaluate(msg: Message, context: Context) -> Message:
    """Measure the model that was sent."""
    net, loader, loss_of = _given(msg), _loader(context, trains=False), nn.BCELoss()
    total, num_right, num_rows = 0.0, 0, 0
    with torch.no_grad():
        for x, y in loader:
            outputs = net(x)
            total += loss_of(outputs, y).item()
            num_right += int(((outputs > 0.5).float() == y).sum())
            num_rows += len(y)
    metrics = MetricRecord(
        {
            "loss": total / len(loader),
            "accuracy": num_right / num_rows,
            "num-examples": len(loader),
        }
    )
    return Message(RecordDict({"metrics": metrics}), reply_to=msg)
