"""Checkpoint files are complete, verified and durable, or they do not exist."""

import json
import math
import resource
from hashlib import file_digest, sha256
from io import BufferedRandom
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors import safe_open
from safetensors.torch import save

from fedlearn.core.messages import Scalar
from fedlearn.errors import CorruptCheckpoint, NewerStore, StoreError
from fedlearn.rounds.records import Checkpoint
from fedlearn.store import checkpoints
from fedlearn.store.checkpoints import (
    CheckpointFile,
    read_checkpoint,
    write_checkpoint,
)
from tests.damage import damaged

SCALARS: st.SearchStrategy[Scalar] = st.one_of(
    st.none(), st.booleans(), st.integers(), st.floats(), st.text()
)


def written(folder: Path, *, num_values: int = 100) -> CheckpointFile:
    """Write a checkpoint of round 7 with one tensor."""
    checkpoint = Checkpoint(
        round_num=7, tensors={"params/w": torch.arange(float(num_values))}, values={"a": 1}
    )
    return write_checkpoint(checkpoint, folder=folder)


@settings(max_examples=30)  # each of several values, and each writes a file durably
@given(values=st.dictionaries(st.text(), SCALARS))
def test_scalars_come_back_exactly_with_their_types(
    tmp_path_factory: pytest.TempPathFactory, values: dict[str, Scalar]
) -> None:
    """Big integers, NaN, infinities, -0.0 and any text survive the metadata."""
    folder = tmp_path_factory.mktemp("values")
    checkpoint = Checkpoint(round_num=0, tensors={}, values=values)
    loaded = read_checkpoint(write_checkpoint(checkpoint, folder=folder), remedy="")
    assert repr(loaded.values) == repr(values)


def test_tensors_come_back_in_their_order(tmp_path: Path) -> None:
    """The file sorts tensors by dtype and name, but a model's weights keep the model's order."""
    tensors = {name: torch.zeros(2) for name in ("z", "a", "m")} | {"b": torch.ones(1).double()}
    checkpoint = Checkpoint(round_num=0, tensors=tensors, values={})
    loaded = read_checkpoint(write_checkpoint(checkpoint, folder=tmp_path), remedy="")
    assert list(loaded.tensors) == ["z", "a", "m", "b"]


@pytest.mark.parametrize(
    "dtype",
    [torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.int64, torch.bool],
    ids=str,
)
@pytest.mark.parametrize("shape", [(), (0,), (3,), (2, 3, 4)], ids=str)
def test_tensors_come_back_bit_for_bit(
    tmp_path: Path, dtype: torch.dtype, shape: tuple[int, ...]
) -> None:
    """For every dtype and shape that a model may have, including scalars and empty tensors."""
    tensor = torch.full(shape, 1.5, dtype=torch.float64).to(dtype)
    checkpoint = Checkpoint(round_num=3, tensors={"params/w": tensor}, values={})
    loaded = read_checkpoint(write_checkpoint(checkpoint, folder=tmp_path), remedy="")
    assert loaded.round_num == 3
    assert loaded.tensors["params/w"].dtype == dtype
    assert torch.equal(loaded.tensors["params/w"], tensor)


def test_views_of_one_vector_and_a_tensor_under_two_names_are_saved_apart(tmp_path: Path) -> None:
    """Parameters are views of one flat vector, and the best model may be the last one."""
    vector = torch.arange(10.0, requires_grad=True)
    tensors = {"params/a": vector[:4], "params/b": vector[::2], "best/a": vector[:4]}
    file = write_checkpoint(Checkpoint(round_num=1, tensors=tensors, values={}), folder=tmp_path)
    loaded = read_checkpoint(file, remedy="")
    assert {name: t.tolist() for name, t in loaded.tensors.items()} == {
        name: t.tolist() for name, t in tensors.items()
    }


def test_the_nan_in_a_tensor_keeps_its_bits(tmp_path: Path) -> None:
    """Including a NaN payload and a negative zero."""
    bits = torch.tensor([0x7FC00001, -0x80000000, 0x7F800000], dtype=torch.int32)
    tensors = {"w": bits.view(torch.float32)}
    file = write_checkpoint(Checkpoint(round_num=1, tensors=tensors, values={}), folder=tmp_path)
    assert torch.equal(read_checkpoint(file, remedy="").tensors["w"].view(torch.int32), bits)


def test_the_same_state_is_the_same_file(tmp_path: Path) -> None:
    """The file depends only on the checkpoint, so two runs can be compared by hash."""
    assert written(tmp_path) == written(tmp_path)
    assert len(list(tmp_path.iterdir())) == 1


def test_the_file_is_ordinary_safetensors(tmp_path: Path) -> None:
    """Any tool can read the tensors."""
    file = written(tmp_path)
    with safe_open(file.path, framework="pt") as content:
        assert list(content.keys()) == ["params/w"]
    assert file.num_bytes == file.path.stat().st_size


def test_one_flipped_bit_anywhere_is_found(tmp_path: Path) -> None:
    """The message has the file, both hashes and the fix."""
    file = written(tmp_path)
    good = file.path.read_bytes()
    for position in (0, 9, len(good) // 2, len(good) - 1):
        bad = bytearray(good)
        bad[position] ^= 1
        file.path.write_bytes(bad)
        with pytest.raises(
            CorruptCheckpoint, match=r"expected sha256 .* found .*; do this"
        ) as error:
            read_checkpoint(file, remedy="do this")
        assert str(file.path) in str(error.value)
        assert file.sha256 in str(error.value)
    file.path.write_bytes(good)
    assert read_checkpoint(file, remedy="do this").round_num == 7


@pytest.mark.parametrize("keep", [0, 4, 100])
def test_a_truncated_file_is_found(tmp_path: Path, keep: int) -> None:
    """It is detected before parsing."""
    file = written(tmp_path)
    file.path.write_bytes(file.path.read_bytes()[:keep])
    with pytest.raises(CorruptCheckpoint, match=rf"\({keep} bytes\)"):
        read_checkpoint(file, remedy="")


def test_a_missing_file_is_a_corrupt_checkpoint(tmp_path: Path) -> None:
    """The run can be rolled back from it as from any corrupt checkpoint."""
    file = written(tmp_path)
    file.path.unlink()
    with pytest.raises(CorruptCheckpoint, match=r"is missing.*do this"):
        read_checkpoint(file, remedy="do this")


def test_a_file_that_cannot_be_read_is_not_called_corrupt(tmp_path: Path) -> None:
    """Simulated by a folder in its place; a failing disk gives a similar error."""
    file = written(tmp_path)
    file.path.unlink()
    file.path.mkdir()
    with pytest.raises(StoreError, match="cannot read") as error:
        read_checkpoint(file, remedy="")
    assert not isinstance(error.value, CorruptCheckpoint)


def test_a_later_format_is_refused_by_name(tmp_path: Path) -> None:
    """The file is intact but from a later version, so the fix is to upgrade."""
    head = json.dumps({"format": 2, "state": "of another shape"})
    content = save({"w": torch.zeros(1)}, {"fedlearn": head})
    file = written(tmp_path)
    file.path.write_bytes(content)
    digest = sha256(content).hexdigest()
    newer = CheckpointFile(round_num=7, path=file.path, sha256=digest, num_bytes=len(content))
    with pytest.raises(NewerStore, match=r"format 2.*up to 1.*upgrade"):
        read_checkpoint(newer, remedy="")


def test_a_head_that_is_none_is_told(tmp_path: Path) -> None:
    """The hash is as recorded, so another program wrote the file. Control: an intact header."""
    whole = json.dumps({"format": 1, "round_num": 7, "values": {}}).encode()
    heads = [
        ({"fedlearn": each.content.decode()}, each.says) for each in damaged(whole, key="round_num")
    ]
    heads += [({"another": "program"}, "__metadata__.fedlearn is missing")]

    def read(metadata: dict[str, str]) -> Checkpoint:
        content, path = save({"w": torch.zeros(1)}, metadata), tmp_path / "checkpoint"
        path.write_bytes(content)
        digest = sha256(content).hexdigest()
        file = CheckpointFile(round_num=7, path=path, sha256=digest, num_bytes=len(content))
        return read_checkpoint(file, remedy="do this")

    assert list(read({"fedlearn": whole.decode()}).tensors) == ["w"]
    for metadata, says in heads:
        with pytest.raises(
            CorruptCheckpoint, match=rf"checkpoint does not hold a checkpoint \({says}.*do this"
        ):
            read(metadata)


def test_a_write_that_fails_halfway_leaves_what_was_there(tmp_path: Path) -> None:
    """The kernel refuses the second half of the file; the previous file is kept."""
    before = written(tmp_path)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (4096, hard))
    try:
        with pytest.raises(StoreError, match=r"cannot write .*: File too large; free some space"):
            written(tmp_path, num_values=2000)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert list(tmp_path.iterdir()) == [before.path]
    assert read_checkpoint(before, remedy="").values == {"a": 1}


def test_a_missing_folder_is_a_store_error(tmp_path: Path) -> None:
    """As if the run's folder was removed during the run."""
    with pytest.raises(StoreError, match="No such file or directory"):
        written(tmp_path / "gone")


def test_values_keep_nan_and_infinity_apart(tmp_path: Path) -> None:
    """Control for the property test above: they are not stored as null."""
    values: dict[str, Scalar] = {"nan": math.nan, "inf": -math.inf, "none": None}
    file = write_checkpoint(Checkpoint(round_num=0, tensors={}, values=values), folder=tmp_path)
    assert repr(read_checkpoint(file, remedy="").values) == repr(values)


def test_two_may_write_the_same_round_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As when a coordinator was replaced without knowing; neither changes the other's file."""
    others = list[CheckpointFile]()

    def overtaken(stream: BufferedRandom, name: str) -> object:
        monkeypatch.setattr(checkpoints, "file_digest", file_digest)
        others.append(written(tmp_path, num_values=50))
        return file_digest(stream, name)

    monkeypatch.setattr(checkpoints, "file_digest", overtaken)
    files = [written(tmp_path), *others]
    assert [read_checkpoint(file, remedy="").round_num for file in files] == [7, 7]
    assert sorted(tmp_path.iterdir()) == sorted(file.path for file in files)
