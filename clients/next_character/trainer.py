"""A client that predicts the next character of a role in Shakespeare, or of your own text file.

Environment:
    FEDLEARN_DATA: The file shakespeare_roles.npz, or a text file.
    FEDLEARN_PART: With the npz file, the play and the role, such as hamlet/HAMLET.
"""

import os
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.utils.data import Dataset

from fedlearn.client import TorchTrainer
from fedlearn.errors import DataError

NUM_CODES = 128  # ASCII
LENGTH = 80


class CharacterModel(nn.Module):
    """A recurrent network: codes [batch, length] to logits [batch, 128, length]."""

    def __init__(self, num_hidden: int = 128) -> None:
        super().__init__()
        self.embedding = nn.Embedding(NUM_CODES, 32)
        self.recurrent = nn.GRU(32, num_hidden, batch_first=True)
        self.output = nn.Linear(num_hidden, NUM_CODES)

    def forward(self, codes: Tensor) -> Tensor:
        """Return the logits of the next character at each position."""
        hidden, _ = self.recurrent(self.embedding(codes))
        logits: Tensor = self.output(hidden)
        return logits.movedim(-1, 1)  # torch's cross-entropy needs the classes in dimension 1


def make_model() -> nn.Module:
    """Build the network; the coordinator and every client call this function."""
    return CharacterModel()


class Windows(Dataset[tuple[Tensor, Tensor]]):
    """A text in windows of 80 characters, each labeled with the characters that follow."""

    def __init__(self, text: Tensor) -> None:
        self._text = text

    def __len__(self) -> int:
        return (len(self._text) - 1) // LENGTH

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        window = self._text[index * LENGTH : (index + 1) * LENGTH + 1].long()
        return window[:-1], window[1:]


def make_trainer() -> TorchTrainer:
    """Build a trainer that trains on the first four fifths of the text and evaluates on the rest.

    Raises:
        DataError: The file or the role is not set or not valid, or the text is too short.
    """
    path = os.environ.get("FEDLEARN_DATA")
    if not path:
        raise DataError("FEDLEARN_DATA is not set; name shakespeare_roles.npz or a text file")
    codes = _read_role(Path(path)) if path.endswith(".npz") else _read_text(Path(path))
    if len(codes) < 10 * LENGTH:
        raise DataError(f"{path} has {len(codes)} characters for this client; give {10 * LENGTH}")
    text = torch.from_numpy(np.minimum(codes, NUM_CODES - 1))
    end = len(text) * 4 // 5
    return TorchTrainer.of(make_model, Windows(text[:end]), test=Windows(text[end:]))


def _read_text(path: Path) -> NDArray[np.uint8]:
    try:
        return np.fromfile(path, np.uint8)
    except OSError as error:
        raise DataError(f"FEDLEARN_DATA: {path} cannot be read: {error}") from error


def _read_role(path: Path) -> NDArray[np.uint8]:
    part = os.environ.get("FEDLEARN_PART", "")
    try:
        with np.load(path, allow_pickle=False) as arrays:
            plays = arrays["play_name"][arrays["play"]]
            names = [
                f"{p.decode()}/{r.decode()}"
                for p, r in zip(plays, arrays["role_name"], strict=True)
            ]
            if part not in names:
                raise DataError(f"FEDLEARN_PART is {part!r}; name a play and role: hamlet/HAMLET")
            start, end = arrays["offset"][names.index(part) :][:2]
            codes: NDArray[np.uint8] = arrays["text"][start:end]
    except (OSError, ValueError, KeyError) as error:
        raise DataError(f"FEDLEARN_DATA: {path} is not the Shakespeare file: {error}") from error
    return codes
