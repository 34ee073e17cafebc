"""Local updates are sent as settings; settings that a trainer would ignore are refused."""

from dataclasses import dataclass, replace
from typing import Any

import pytest

from fedlearn.algorithms.adam import LocalAdam
from fedlearn.algorithms.apfl import MixedModel
from fedlearn.algorithms.clustered import InCluster
from fedlearn.algorithms.ditto import PersonalModel
from fedlearn.algorithms.elastic_averaging import ElasticForce
from fedlearn.algorithms.fedala import LearnedStart
from fedlearn.algorithms.feddyn import DynamicRegularizer
from fedlearn.algorithms.fedexp import ReportedNorm
from fedlearn.algorithms.fednova import NormalizedUpdate
from fedlearn.algorithms.fedrep import HeadThenBody
from fedlearn.algorithms.gradient_clipping import ClippedGradients
from fedlearn.algorithms.ifca import ChosenCluster
from fedlearn.algorithms.knn_per import NearestNeighbors
from fedlearn.algorithms.local import (
    LocalSgd,
    LocalUpdate,
    LocalUpdateWrapper,
    LocalWork,
    Memory,
    Moment,
)
from fedlearn.algorithms.local import Tensors as Stack
from fedlearn.algorithms.mime_lite import ServerMomentumSteps
from fedlearn.algorithms.moon import ModelContrast
from fedlearn.algorithms.noised_gradients import NoisedGradients
from fedlearn.algorithms.own_training import OwnTraining
from fedlearn.algorithms.per_fedavg import MetaGradient
from fedlearn.algorithms.pfedme import MoreauStep
from fedlearn.algorithms.proximal import Proximal
from fedlearn.algorithms.qfedavg import FairUpdate
from fedlearn.algorithms.rate_schedules import ScheduledRate
from fedlearn.algorithms.scaffold import ControlVariates
from fedlearn.algorithms.settings import (
    own_classes,
    require_honored,
    settings_names,
    settings_of,
    transforms_from,
    update_from,
)
from fedlearn.algorithms.transforms import ClippedUpdates
from fedlearn.core.messages import Scalar
from fedlearn.errors import ConfigError, SettingsRefused

SGD = LocalSgd(epochs=1, batch_size=4, learning_rate=0.1)
ADAM = LocalAdam(
    epochs=2,
    batch_size=None,
    learning_rate=0.001,
    beta_1=0.9,
    beta_2=0.999,
    epsilon=1e-8,
    decoupled=True,
    keep_moments=True,
)


@dataclass(frozen=True, kw_only=True)
class SignSgd(LocalWork):
    """A local update defined by the user."""

    rate: float

    def step(
        self, x: Stack, grads: Stack, memory: Memory, *, broadcast: Memory, moment: Moment
    ) -> None:
        for value, grad in zip(x, grads, strict=True):
            value.sub_(grad.sign(), alpha=self.rate)


@dataclass(frozen=True, kw_only=True)
class Halved(LocalUpdateWrapper):
    """A wrapper defined by the user, without fields."""


UPDATES: dict[str, LocalUpdate] = {
    "sgd": replace(SGD, momentum=0.5, keep_momentum=True, batch_size=None),
    "adam": ADAM,
    "own": OwnTraining(epochs=3),
    "proximal": Proximal(inner=SGD, proximal=0.5),
    "clipped": ClippedGradients(inner=ADAM, gradient_clip_norm=1.0),
    "three": ScheduledRate(
        inner=Proximal(inner=ClippedGradients(inner=SGD, gradient_clip_norm=2.0), proximal=0.1),
        rate_decay=0.9,
        warmup_steps=3,
    ),
    "cosine": ScheduledRate(inner=SGD, cosine_rounds=7),
    "apfl": MixedModel(inner=SGD, personal_learning_rate=0.2, mixing=0.3, adapts_mixing=True),
    "clustered": InCluster(inner=SGD, cluster=2),
    "ifca": ChosenCluster(inner=SGD, num_clusters=3, update_bound=None),
    "fedrep": HeadThenBody(inner=ADAM, head="head.* 3.bias", head_epochs=1),
    "knn_per": NearestNeighbors(
        inner=SGD, representation="1", num_neighbors=3, neighbor_weight=0.25
    ),
    "fedala": LearnedStart(inner=ADAM, adaptive="head.*", mixing_rate=0.5, mixing_share=0.25),
    "scaffold": ControlVariates(inner=SGD, control_bound=None),
    "easgd": ElasticForce(inner=SGD, elasticity=0.5),
    "fednova": NormalizedUpdate(inner=Proximal(inner=SGD, proximal=0.5), effective_steps_bound=2.0),
    "feddyn": DynamicRegularizer(inner=SGD, alpha=2.0),
    "moon": ModelContrast(inner=SGD, contrast=2.0, temperature=0.3, representation="body.0"),
    "ditto": PersonalModel(inner=ADAM, personal_learning_rate=0.2, personal_pull=0.3),
    "perfedavg": MetaGradient(inner=SGD, adaptation_rate=0.2, hessian_step=1e-2),
    "perfedavg, first order": MetaGradient(inner=SGD, adaptation_rate=0.2, hessian_step=None),
    "pfedme": MoreauStep(inner=SGD, attachment=3.0, personal_steps=4, personal_learning_rate=0.3),
    "qfedavg": FairUpdate(inner=SGD, fairness=2.0, step_size=0.3, normalizer_bound=4.0),
    "mime": ServerMomentumSteps(inner=SGD, server_momentum=0.5, full_gradient_bound=2.0),
    "fedexp": ReportedNorm(inner=SGD, square_norm_bound=2.0),
    "by example": NoisedGradients(
        inner=Proximal(inner=ADAM, proximal=0.5),
        example_clip_norm=0.5,
        example_noise_multiplier=2.0,
    ),
    "a rule of one's own": SignSgd(epochs=1, batch_size=2, rate=0.01),
    "around, of one's own": Halved(inner=SignSgd(epochs=1, batch_size=2, rate=0.01)),
}


@pytest.mark.parametrize("name", list(UPDATES))
def test_settings_travel_and_come_back(name: str) -> None:
    """``update_from`` is the inverse of ``settings_of``, for any nesting."""
    local = UPDATES[name]
    settings = settings_of(local, [ClippedUpdates(update_clip_norm=3.0)])
    assert update_from(settings, known=own_classes([local])) == local
    assert transforms_from(settings) == (ClippedUpdates(update_clip_norm=3.0),)
    assert all(isinstance(value, int | float | str | bool | None) for value in settings.values())


def test_whole_numbers_are_reals_too() -> None:
    """TOML and JSON may contain 1 for 1.0."""
    local = update_from({**settings_of(SGD), "learning_rate": 1})
    assert isinstance(local, LocalSgd)
    assert local.learning_rate == 1.0
    assert isinstance(local.learning_rate, float)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"epochs": 1.5}, "'epochs' is 1.5, not of type int"),
        ({"epochs": True}, "'epochs'"),
        ({"batch_size": "4"}, "'batch_size' is '4', not of type int or NoneType"),
        ({"learning_rate": None}, "'learning_rate'"),
        ({"shuffle": 1}, "'shuffle'"),
        ({"more": 1}, "'more' is unknown to 'sgd'"),
        ({"momentum": 2.0}, "momentum is 2.0"),
        ({"update": "adagrad"}, "'adagrad', which this client does not know"),
        ({"update": "proximal"}, "'proximal' is missing"),
        ({"update": 7}, "'update' is 7"),
    ],
)
def test_settings_of_other_types_or_names_are_refused(
    changes: dict[str, Scalar], words: str
) -> None:
    """A request from another version is an error; it must not change the training silently."""
    with pytest.raises(SettingsRefused, match=words):
        update_from({**settings_of(SGD), **changes})


def test_missing_settings_are_refused() -> None:
    """A field without default is required, and so is the list of updates."""
    settings = dict(settings_of(Proximal(inner=SGD, proximal=0.5)))
    del settings["proximal"]
    with pytest.raises(SettingsRefused, match="proximal"):
        update_from(settings)
    with pytest.raises(SettingsRefused, match="names no update"):
        update_from({})


@pytest.mark.parametrize("pieces", ["proximal sgd", "sgd sgd", "sgd adam"])
def test_pieces_in_another_order_are_refused(pieces: str) -> None:
    """One update comes first, then its wrappers."""
    settings = {**settings_of(ADAM), **settings_of(Proximal(inner=SGD, proximal=0.5))}
    with pytest.raises(SettingsRefused, match="name one update first"):
        update_from({**settings, "update": pieces})


def test_an_update_that_the_client_does_not_know_is_named() -> None:
    """Control: ``test_settings_travel_and_come_back`` passes its class."""
    with pytest.raises(SettingsRefused, match="'SignSgd', which this client does not know"):
        update_from(settings_of(UPDATES["a rule of one's own"]))


def test_a_setting_that_cannot_travel_is_refused_at_the_coordinator() -> None:
    """Two updates of the same class are refused too: the client could not tell them apart."""

    @dataclass(frozen=True, kw_only=True)
    class Listing(SignSgd):
        layers: tuple[str, ...]

    with pytest.raises(ConfigError, match="'layers' is a tuple"):
        settings_of(Listing(epochs=1, batch_size=2, rate=0.01, layers=("a",)))
    once = Proximal(inner=SGD, proximal=0.5)
    with pytest.raises(ConfigError, match="'proximal' belongs to two components"):
        settings_of(Proximal(inner=once, proximal=0.5))


BASIC = ("epochs", "batch_size", "learning_rate")


@pytest.mark.parametrize(
    ("local", "honored", "refused"),
    [
        (SGD, BASIC, None),
        (SGD, ("epochs", "batch_size"), "'learning_rate', which is 0.1"),
        (replace(SGD, momentum=0.9), BASIC, "'momentum', which is 0.9"),
        (replace(SGD, momentum=0.9), (*BASIC, "momentum"), None),
        (replace(SGD, shuffle=False), BASIC, "'shuffle', which is False"),
        (Proximal(inner=SGD, proximal=0.5), BASIC, "'proximal', which is 0.5"),
        (Proximal(inner=SGD, proximal=0.5), (*BASIC, "proximal"), None),
        (ADAM, BASIC, "'beta_1', which is 0.9"),
        (OwnTraining(), (), None),
        (OwnTraining(epochs=2), (), "'epochs', which is 2"),
        (UPDATES["a rule of one's own"], (*BASIC, "rate", "shuffle", "SignSgd"), None),
    ],
)
def test_a_setting_that_a_trainer_would_ignore_is_refused(
    local: LocalUpdate, honored: tuple[str, ...], refused: str | None
) -> None:
    """The message has its name and value. A setting at its default need not be honored."""
    if refused is None:
        require_honored(settings_of(local), honored, who="Mine")
    else:
        with pytest.raises(SettingsRefused, match=f"Mine does not honor the setting {refused}"):
            require_honored(settings_of(local), honored, who="Mine")


def test_transforms_are_the_sessions_to_honor() -> None:
    """The session clips the update, whichever trainer made it."""
    settings = settings_of(SGD, [ClippedUpdates(update_clip_norm=3.0)])
    require_honored(settings, BASIC, who="Mine")


def test_our_own_trainer_honors_all_that_it_knows() -> None:
    """The standard updates' fields, and those of the classes that it was given."""
    names = settings_names([SignSgd])
    assert {"rate", "SignSgd", "momentum", "beta_1", "proximal", "warmup_steps"} <= names
    assert "rate" not in settings_names()


def test_classes_that_cannot_be_told_apart_by_their_names_are_refused() -> None:
    """Two classes with one name, or a standard name. Control: the same class twice."""
    mine = UPDATES["a rule of one's own"]
    other = type("SignSgd", (LocalSgd,), {})(epochs=1, batch_size=2, learning_rate=0.1)
    with pytest.raises(ConfigError, match="two local updates are called 'SignSgd'"):
        own_classes([mine, other])
    assert own_classes([mine, SGD, mine]) == [SignSgd]
    with pytest.raises(ConfigError, match="the name of another component, 'sgd'"):
        settings_of(type("sgd", (LocalSgd,), {})(epochs=1, batch_size=2, learning_rate=0.1))


@pytest.mark.parametrize("honors", ["extra.width", "epochs", None])
def test_names_of_settings_are_a_tuple(honors: Any) -> None:
    """In the text ("extra.width"), a test for "extra" finds a part. Control: the tuple is exact."""
    settings = {**settings_of(OwnTraining()), "extra.depth": 3}
    with pytest.raises(SettingsRefused, match="give a tuple of names"):
        require_honored(settings, honors, who="Mine")
    with pytest.raises(SettingsRefused, match="free-form setting 'depth'"):
        require_honored(settings, ("extra.width",), who="Mine")
