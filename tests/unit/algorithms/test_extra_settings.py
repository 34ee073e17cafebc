"""Free-form settings are sent next to the standard ones, under a prefix."""

import math
from dataclasses import replace
from typing import Any

import pytest

from fedlearn.algorithms.extra_settings import ExtraSettings, WithExtra, split_settings
from fedlearn.algorithms.local import LocalSgd
from fedlearn.algorithms.per_client import PerClient
from fedlearn.algorithms.recipes import FedAvg
from fedlearn.algorithms.settings import own_classes, require_honored, settings_of, update_from
from fedlearn.core.messages import ClientId
from fedlearn.errors import SettingsRefused

SGD = LocalSgd(epochs=1, batch_size=4, learning_rate=0.1)
HONORED = ("epochs", "batch_size", "learning_rate")
TOLD = ExtraSettings(inner=SGD, extra=(("epochs", 9), ("loss.weight", 0.5), ("way", "up")))


def test_they_are_divided_from_those_of_the_update() -> None:
    """Also if one has the name of a field: the update is the same as without free-form settings."""
    settings, extra = split_settings(settings_of(TOLD))
    assert extra == {"epochs": 9, "loss.weight": 0.5, "way": "up"}
    assert settings == settings_of(SGD)
    assert update_from(settings) == SGD
    assert own_classes([TOLD]) == []


@pytest.mark.parametrize(
    ("more", "ignored"),
    [
        (("extra",), None),
        (("extra.epochs", "extra.loss.weight", "extra.way"), None),
        (("extra.epochs", "extra.way"), "loss.weight"),
        ((), "epochs"),
    ],
)
def test_a_trainer_honors_all_or_some_of_them(more: tuple[str, ...], ignored: str | None) -> None:
    """Settings that it would ignore are refused."""
    settings = settings_of(TOLD)
    if ignored is None:
        require_honored(settings, HONORED + more, who="Mine")
        return
    with pytest.raises(SettingsRefused, match=f"Mine does not honor the free-form .*'{ignored}'"):
        require_honored(settings, HONORED + more, who="Mine")


def test_clients_that_differ_are_told_the_same_beside_it() -> None:
    """Clients with the same local update get equal settings."""
    slow = PerClient(FedAvg(SGD), lambda client: replace(SGD, epochs=2) if client else SGD)
    told = WithExtra.around(slow, {"way": "up"}).locals_for([ClientId(0), ClientId(1)])
    assert [each.work.epochs for each in told] == [1, 2]
    assert [settings_of(each)["extra.way"] for each in told] == ["up", "up"]
    alike = WithExtra.around(FedAvg(SGD), {"way": "up"}).locals_for([ClientId(0), ClientId(1)])
    assert alike[0] == alike[1]


@pytest.mark.parametrize(
    ("name", "value", "words"),
    [
        ("", 1, "the name ''"),
        ("two words", 1, "the name 'two words'"),
        ("x" * 65, 1, "1 to 64 letters"),
        ("rate", math.nan, "extra.rate is nan"),
        ("rate", None, "extra.rate is None"),
        ("rate", [1], r"extra.rate is \[1\]"),
    ],
)
def test_what_cannot_be_told_is_refused(name: str, value: Any, words: str) -> None:  # Any: wrong
    """The message contains the name, the value, and the values allowed."""
    with pytest.raises(ValueError, match=words):
        ExtraSettings(inner=SGD, extra=((name, value),))
