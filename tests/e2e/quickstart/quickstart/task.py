"""The model, the data of a partition, and how both are trained and tested."""

from typing import TypeAlias

import torch
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, random_split

#: A row, or a batch of them: columns by name, as Hugging Face's datasets yield them.
Row: TypeAlias = dict[str, Tensor]
Loader: TypeAlias = DataLoader[Row]


class Digits(Dataset[Row]):
    """A partition of the digits, as rows with an image and a label."""

    def __init__(self, partition_id: int, num_partitions: int) -> None:
        digits = load_digits()
        images = torch.tensor(digits.images, dtype=torch.float32).unsqueeze(1) / 16.0
        self.images = images[partition_id::num_partitions]
        self.labels = torch.tensor(digits.target)[partition_id::num_partitions]

    def __len__(self) -> int:
        """Return the number of rows."""
        return len(self.labels)

    def __getitem__(self, index: int) -> Row:
        """Return a row."""
        return {"img": self.images[index], "label": self.labels[index]}


class Net(nn.Module):
    """A small convolutional network for images of 8 x 8 pixels."""

    def __init__(self) -> None:
        super().__init__()
        self.features = nn.Sequential(
            nn.Conv2d(1, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(), nn.MaxPool2d(2)
        )
        self.classes = nn.Linear(8 * 4 * 4, 10)

    def forward(self, images: Tensor) -> Tensor:
        """Return an output for each class."""
        outputs: Tensor = self.classes(self.features(images).flatten(1))
        return outputs


def load_data(partition_id: int, num_partitions: int, batch_size: int) -> tuple[Loader, Loader]:
    """Return loaders over a partition of the digits: four fifths to train on, the rest to test."""
    examples = Digits(partition_id, num_partitions)
    num_train = len(examples) * 4 // 5
    train, test = random_split(
        examples, [num_train, len(examples) - num_train], torch.Generator().manual_seed(42)
    )
    order = torch.Generator().manual_seed(partition_id)
    train_loader = DataLoader(train, batch_size=batch_size, shuffle=True, generator=order)
    return train_loader, DataLoader(test, batch_size=64)


def num_examples(loader: Loader) -> int:
    """Return the number of examples of a loader."""
    return sum(len(batch["label"]) for batch in loader)


def train(net: Net, loader: Loader, epochs: int, lr: float, device: torch.device) -> float:
    """Train by SGD with momentum; return the mean loss of a batch."""
    loss_of, total = nn.CrossEntropyLoss(), 0.0
    optimizer = torch.optim.SGD(net.parameters(), lr=lr, momentum=0.9)
    net.to(device).train()
    for _ in range(epochs):
        for batch in loader:
            optimizer.zero_grad()
            loss = loss_of(net(batch["img"].to(device)), batch["label"].to(device))
            loss.backward()
            optimizer.step()
            total += loss.item()
    return total / (epochs * len(loader))


def test(net: Net, loader: Loader, device: torch.device) -> tuple[float, float]:
    """Return the mean loss of a batch, and the accuracy."""
    loss_of, total, correct = nn.CrossEntropyLoss(), 0.0, 0
    net.to(device).eval()
    with torch.no_grad():
        for batch in loader:
            outputs, labels = net(batch["img"].to(device)), batch["label"].to(device)
            total += loss_of(outputs, labels).item()
            correct += int((outputs.argmax(dim=1) == labels).sum())
    return total / len(loader), correct / num_examples(loader)
