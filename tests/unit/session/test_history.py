"""The file in which a client records what it has done with coordinators, by key and across runs."""

import stat
from pathlib import Path

import pytest

from fedlearn.core.messages import ClientId
from fedlearn.errors import DeploymentError
from fedlearn.secagg.messages import MaskedVector, SurvivorSignature
from fedlearn.secagg.releases import PastRelease, PastReleases
from fedlearn.session.history import History, HistoryFile

PAST = PastRelease(
    run_id=b"r" * 16,
    is_evaluation=True,
    round_num=3,
    attempt=1,
    session=b"s" * 32,
    num_releases=2,
    survivors=(ClientId(1), ClientId(5)),
)
HISTORY = History(is_bound=True, releases=PastReleases((PAST,)))


def file_of(folder: Path, key: bytes = b"k" * 32) -> HistoryFile:
    return HistoryFile(path=folder / "history.json", coordinator_key=key)


def test_a_history_comes_back_and_is_private(tmp_path: Path) -> None:
    file = file_of(tmp_path)
    assert file.read() == History()
    file.write(HISTORY)
    assert file_of(tmp_path).read() == HISTORY
    assert stat.S_IMODE(file.path.stat().st_mode) == 0o600


def test_coordinators_are_kept_apart_and_none_makes_another_forgotten(tmp_path: Path) -> None:
    one, other = file_of(tmp_path), file_of(tmp_path, b"o" * 32)
    one.write(HISTORY)
    assert other.read() == History()
    other.write(History(is_bound=True))
    assert one.read() == HISTORY
    assert other.read() == History(is_bound=True)


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"[]",
        b"{}",
        b'{"format": 1, "coordinators": {}}',
        b'{"format": 2, "coordinators": 3}',
        b'{"coordinators": {}}',
        b'{"format": 2, "coordinators": {"%s": {"is_bound": true}}}' % (b"k" * 32).hex().encode(),
        b'{"format": 2, "coordinators": {"%s": {"is_bound": true, "releases": [{}]}}}'
        % (b"k" * 32).hex().encode(),
    ],
)
def test_a_damaged_history_is_not_taken_for_empty(tmp_path: Path, content: bytes) -> None:
    """Otherwise a coordinator that could damage it could have every sum opened a second time."""
    file = file_of(tmp_path)
    file.path.write_bytes(content)
    with pytest.raises(DeploymentError, match="does not hold which sums"):
        file.read()


def test_a_masked_vector_binds_and_nothing_before_it() -> None:
    masked = MaskedVector(session=bytes(32), packed=b"")
    assert History().record_answer(masked, PastReleases()).is_bound
    signature = SurvivorSignature(signature=bytes(64))
    assert not History().record_answer(signature, PastReleases()).is_bound
    assert HISTORY.record_answer(signature, PastReleases((PAST,))) == HISTORY, "what binds stays"
