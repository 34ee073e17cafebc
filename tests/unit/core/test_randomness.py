"""Public seeds are reproducible and independent; secrets can be neither shown nor copied."""

import pickle

import numpy as np
import pytest
import torch

from fedlearn.core.randomness import Seed, lock_global_generators, seed_global_generators
from fedlearn.core.secret_bytes import SecretBytes

GOLDEN_DERIVED = 3285059369060519452
GOLDEN_HASHES = [8075172986249684972, 14574897457539200646]


def test_a_seed_gives_the_same_numbers_on_every_machine() -> None:
    """Golden values: a change here changes every recorded run."""
    assert Seed(7).derive("cohort", 3).value == GOLDEN_DERIVED
    assert Seed(7).hash(1, np.arange(2)).tolist() == GOLDEN_HASHES


def test_code_that_draws_from_torch_is_seeded() -> None:
    """The same numbers for the same seed. Control: others for another one."""

    def draw(seed: int) -> torch.Tensor:
        with lock_global_generators():
            seed_global_generators(Seed(seed))
            return torch.rand(4)

    assert torch.equal(draw(1), draw(1))
    assert not torch.equal(draw(1), draw(2))


def test_labels_are_not_confused() -> None:
    """("a", "b") is not ("ab",), 1 is not "1", and the order counts."""
    seed = Seed(0)
    derived = [
        seed.derive("a", "b"),
        seed.derive("ab"),
        seed.derive("b", "a"),
        seed.derive("a", 1),
        seed.derive("a", "1"),
        seed,
        Seed(1).derive("a", "b"),
    ]
    assert len({each.value for each in derived}) == len(derived)


@pytest.mark.parametrize("value", [-1, 2**63])
def test_a_seed_out_of_range_is_refused(value: int) -> None:
    """The message has the value."""
    with pytest.raises(ValueError, match=str(value)):
        Seed(value)


def test_hashes_do_not_depend_on_which_others_are_asked() -> None:
    """The value for (client, round) is the same alone and in a block."""
    clients = np.arange(1000)
    together = Seed(3).hash(5, clients)
    assert together.tolist() == [int(Seed(3).hash(5, int(c))) for c in clients]
    assert len(np.unique(together)) == 1000
    assert not np.array_equal(together, Seed(3).hash(clients, 5)), "positions differ"


def test_uniform_and_normal_numbers_are_what_they_are_called() -> None:
    """Moments of 100,000 samples match; consecutive ids are uncorrelated."""
    ids = np.arange(100_000)
    uniform, normal = Seed(1).uniform(ids), Seed(1).normal(ids)
    assert 0.0 < uniform.min() < uniform.max() < 1.0
    assert abs(uniform.mean() - 0.5) < 4 / np.sqrt(12 * 100_000)
    assert abs(normal.mean()) < 4 / np.sqrt(100_000)
    assert abs(normal.std() - 1.0) < 0.01
    assert abs(np.corrcoef(normal[1:], normal[:-1])[0, 1]) < 0.015


def test_no_uniform_number_rounds_to_zero_or_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """The extreme hashes are one in 2^64, so they are put in here."""
    extremes = np.array([0, 2**64 - 1], np.uint64)
    monkeypatch.setattr(Seed, "hash", lambda *_: extremes)
    least, most = Seed(1).uniform(0)
    assert 0.0 < least < 2.0**-53
    assert most == 1.0 - 2.0**-53


def test_generators_start_afresh() -> None:
    """Two from one seed draw alike, and torch's global generator does not advance."""
    before = torch.random.get_rng_state()
    draws = [torch.rand(3, generator=Seed(4).torch()).tolist() for _ in range(2)]
    assert draws[0] == draws[1]
    assert Seed(4).numpy().random() == Seed(4).numpy().random()
    assert torch.equal(torch.random.get_rng_state(), before)


def test_secrets_are_neither_shown_nor_copied_nor_hashed() -> None:
    """Nor turned into a seed; the code that needs them still gets the bytes."""
    secret = SecretBytes(b"correct horse")
    assert "horse" not in f"{secret} {secret!r} {[secret]}"
    with pytest.raises(TypeError, match="not pickled"):
        pickle.dumps(secret)
    with pytest.raises(TypeError, match="not hashed"):
        hash(secret)
    assert secret == SecretBytes(b"correct horse")
    assert secret != SecretBytes(b"battery")
    assert secret != b"correct horse"
    assert secret.reveal() == b"correct horse"
    assert SecretBytes.generate(16) != SecretBytes.generate(16)
