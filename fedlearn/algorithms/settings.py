"""Settings of local updates: how the coordinator sends the training rule to clients.

Settings are a flat mapping: the fields of an update, of the updates that it wraps, and of the
transforms after it. The entry :data:`COMPONENTS` lists their names, the innermost update first. A
custom class is listed by its class name, a transform as ``transform:NAME``. A custom trainer reads
the fields by name, and free-form settings too (:mod:`fedlearn.algorithms.extra_settings`).
"""

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import MISSING, Field, fields, is_dataclass
from types import NoneType
from typing import Any, get_args, get_type_hints

import numpy as np

from fedlearn.algorithms.adam import LocalAdam
from fedlearn.algorithms.apfl import MixedModel
from fedlearn.algorithms.clustered import InCluster
from fedlearn.algorithms.compression import Compressor, find_compressor
from fedlearn.algorithms.ditto import PersonalModel
from fedlearn.algorithms.elastic_averaging import ElasticForce
from fedlearn.algorithms.extra_settings import EXTRA, ExtraSettings, split_settings
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
    iter_updates,
)
from fedlearn.algorithms.mime_lite import ServerMomentumSteps
from fedlearn.algorithms.moon import ModelContrast
from fedlearn.algorithms.noised_gradients import NoisedGradients
from fedlearn.algorithms.own_training import OwnTraining
from fedlearn.algorithms.per_fedavg import MetaGradient
from fedlearn.algorithms.pfedme import MoreauStep
from fedlearn.algorithms.power_sgd import PowerSgd
from fedlearn.algorithms.proximal import Proximal
from fedlearn.algorithms.qfedavg import FairUpdate
from fedlearn.algorithms.quantization import Quantized
from fedlearn.algorithms.random_k import RandomK, SharedRandomK
from fedlearn.algorithms.rate_schedules import ScheduledRate
from fedlearn.algorithms.scaffold import ControlVariates
from fedlearn.algorithms.top_k import TopK
from fedlearn.algorithms.transforms import ClipIndicator, ClippedUpdates, NoisedUpdates, Transform
from fedlearn.core.messages import Scalar, Settings
from fedlearn.errors import ConfigError, SettingsRefused

#: Name of the setting that lists the updates and transforms.
COMPONENTS = "update"

_Kind = type[Any]  # Any: updates and transforms have no base class in common

#: The updates that every client knows, by their names in settings. Names never change: clients of
#: earlier versions look them up.
UPDATES: Mapping[str, _Kind] = {
    "sgd": LocalSgd,
    "adam": LocalAdam,
    "own": OwnTraining,
    "proximal": Proximal,
    "clipped": ClippedGradients,
    "scheduled": ScheduledRate,
    "control_variates": ControlVariates,
    "elastic_force": ElasticForce,
    "noised_gradients": NoisedGradients,
    "reported_norm": ReportedNorm,
    "server_momentum_steps": ServerMomentumSteps,
    "fair_update": FairUpdate,
    "moreau_step": MoreauStep,
    "meta_gradient": MetaGradient,
    "model_contrast": ModelContrast,
    "personal_model": PersonalModel,
    "dynamic_regularizer": DynamicRegularizer,
    "normalized_update": NormalizedUpdate,
    "head_then_body": HeadThenBody,
    "mixed_model": MixedModel,
    "learned_start": LearnedStart,
    "chosen_cluster": ChosenCluster,
    "nearest_neighbors": NearestNeighbors,
    "in_cluster": InCluster,
}

#: The transforms that every client knows, by their names in settings, which never change either.
TRANSFORMS: Mapping[str, type[Transform]] = {
    "clipped_update": ClippedUpdates,
    "told_below": ClipIndicator,
    "noised_update": NoisedUpdates,
    "top_k": TopK,
    "random_k": RandomK,
    "shared_random_k": SharedRandomK,
    "quantized": Quantized,
    "power_sgd": PowerSgd,
}

#: Components with which a client adds noise to everything it sends.
_NOISED = frozenset({"noised_gradients", "noised_update"})

#: Former names of renamed fields. Settings use them, so that older clients can read them.
_TRAVELS_AS = {"gradient_clip_norm": "max_gradient_norm", "update_clip_norm": "max_update_norm"}

#: Fields of standard updates that are sent only if they are set, since clients of earlier versions
#: refuse a setting that they do not know.
_ADDED = frozenset({"max_steps", "per_client"})

_INNER = "inner"
#: Prefix of the name of a custom transform.
_TRANSFORM = "transform:"


def settings_of(local: LocalUpdate, transforms: Sequence[Transform] = ()) -> Settings:
    """Convert a local update and transforms to the settings that a request carries.

    A custom class is sent by name; the clients' trainer must know it by that name.

    Raises:
        ConfigError: An update or transform is not a dataclass, a field is not a plain value, two
            of them have a field of the same name, or a class has the name of a standard one.

    Example:
        >>> local = LocalSgd(epochs=1, batch_size=8, learning_rate=0.1)
        >>> settings = settings_of(Proximal(inner=local, proximal=0.5))
        >>> settings["update"], settings["epochs"], settings["proximal"]
        ('sgd proximal', 1, 0.5)
    """
    return _settings_of([*iter_updates(local), *transforms], num_transforms=len(transforms))


def compressor_settings(compressor: Compressor) -> Settings:
    """Convert a compressor of models to settings, as :func:`settings_of` does.

    Example:
        >>> compressor_settings(Quantized(bits=4))["bits"]
        4
    """
    return _settings_of([compressor], num_transforms=1)


def compressor_from(settings: Settings, *, known: Collection[type[Transform]] = ()) -> Compressor:
    """Build the compressor of models that ``settings`` describe.

    Raises:
        SettingsRefused: As :func:`update_from`, or it cannot compress a model.
    """
    found = transforms_from(settings, known=known)
    if len(found) != 1 or not isinstance(found[0], Compressor) or not found[0].suits_models:
        raise SettingsRefused(
            f"{settings.get(COMPONENTS)!r} cannot compress a model; the coordinator must name one "
            "compressor that can, such as 'quantized'"
        )
    return found[0]


def _settings_of(components: Sequence[object], *, num_transforms: int) -> Settings:
    names, settings = list[str](), dict[str, Scalar]()
    first_transform = len(components) - num_transforms
    for place, component in enumerate(components):
        if isinstance(component, ExtraSettings):
            settings |= component.settings()
            continue
        if not is_dataclass(component):
            raise ConfigError(
                f"{_place(type(component))} cannot be sent to clients, which build it from its "
                "fields; write it as a frozen dataclass whose fields are plain values"
            )
        is_transform = place >= first_transform
        names.append(_transform_name(type(component)) if is_transform else _name(type(component)))
        for name, field in _fields(type(component)).items():
            value = getattr(component, field.name)
            # NumPy scalars are no plain numbers to the codec.
            if isinstance(value, np.generic):
                value = value.item()
            # Settings are flat, so components must not share a name.
            if name in settings or name == COMPONENTS:
                raise ConfigError(
                    f"local setting {name!r} belongs to two components ({' '.join(names)}); use "
                    "each kind of component once"
                )
            if not isinstance(value, int | float | str | bool | None):
                raise ConfigError(
                    f"local setting {name!r} is a {type(value).__name__}, which cannot be sent; "
                    "give a number, a string, a boolean or None"
                )
            if name in _ADDED and value == field.default:
                continue
            settings[name] = value
    return {COMPONENTS: " ".join(names), **settings}


def require_travels(locals_: Iterable[LocalUpdate], transforms: Sequence[Transform]) -> None:
    """Raise ConfigError if these cannot be sent to clients; see :func:`settings_of`."""
    # Clients usually share one object: check it once.
    for local in {id(each): each for each in locals_}.values():
        settings_of(local, transforms)
    own_transforms(transforms)
    find_compressor(transforms)


def update_from(settings: Settings, *, known: Collection[_Kind] = ()) -> LocalUpdate:
    """Build the local update that ``settings`` describe.

    Args:
        settings: Settings from :func:`settings_of`, usually received from the coordinator.
        known: Custom classes that ``settings`` may name.

    Raises:
        SettingsRefused: A class is not known, or a field is missing, unknown, of the wrong type or
            out of range.
    """
    update: Any = None  # the first update wraps no other
    for name, kind, values in _read_all(settings, known):
        if _is_transform(name):
            continue
        # The first update wraps none; each of the others wraps the one before it.
        if (update is None) == issubclass(kind, LocalUpdateWrapper):
            raise SettingsRefused(
                f"local setting {COMPONENTS!r} is {settings[COMPONENTS]!r}; name one update first, "
                "then its wrappers"
            )
        update = _build(kind, values) if update is None else _build(kind, values, inner=update)
    if not isinstance(update, LocalUpdate):
        raise SettingsRefused(f"local setting {COMPONENTS!r} names no update")
    return update


def transforms_from(
    settings: Settings, *, known: Collection[type[Transform]] = ()
) -> tuple[Transform, ...]:
    """Build the transforms that ``settings`` describe, in the order in which they are applied.

    Args:
        settings: Settings from :func:`settings_of`, usually received from the coordinator.
        known: Custom classes that ``settings`` may name.

    Raises:
        SettingsRefused: As :func:`update_from`.
    """
    kinds = _transform_kinds(settings, known)
    return tuple(_build(kind, _read(settings, kind)) for kind in kinds)


def without_transforms(settings: Settings, *, known: Collection[type[Transform]] = ()) -> Settings:
    """Remove the transforms, which the trainer does not need; raises as :func:`transforms_from`."""
    kinds = _transform_kinds(settings, known)
    if not kinds:
        return settings
    theirs = {name for kind in kinds for name in _fields(kind)}
    names = [name for name in _names(settings) if not _is_transform(name)]
    rest = {name: value for name, value in settings.items() if name not in theirs}
    return {**rest, COMPONENTS: " ".join(names)}


def last_noise(settings: Settings) -> float | None:
    """Return the noise multiplier of :class:`NoisedUpdates` if it is the last transform.

    Only fedlearn's own compression may follow, which computes from the noised update alone.
    Otherwise ``None``: a later transform could undo the noise.
    """
    names = _names(settings)
    if names and issubclass(TRANSFORMS.get(names[-1], object), Compressor):
        names.pop()
    if not names or TRANSFORMS.get(names[-1]) is not NoisedUpdates:
        return None
    noised: NoisedUpdates = _build(NoisedUpdates, _read(settings, NoisedUpdates))
    return noised.noise_multiplier


def looks_like_query(settings: Settings) -> bool:
    """Whether settings may be those of a query: a custom class that declares no epochs.

    A client knows for sure only once it has the request, which has no model.

    Example:
        >>> looks_like_query({COMPONENTS: "Moments", "num_features": 3})
        True
        >>> looks_like_query(settings_of(LocalSgd(epochs=1, batch_size=8, learning_rate=0.1)))
        False
    """
    names = [name for name in _names(settings) if not _is_transform(name)]
    return "epochs" not in settings and bool(names) and UPDATES.keys().isdisjoint(names)


def _transform_kinds(settings: Settings, known: Collection[type[Transform]]) -> list[_Kind]:
    # Standard names win: a user's class must not take the place of, say, the noise.
    kinds = {**{_transform_name(kind): kind for kind in known}, **TRANSFORMS}
    names = [name for name in _names(settings) if _is_transform(name)]
    for name in names:
        if name not in kinds:
            raise SettingsRefused(_describe_unknown(name))
    return [kinds[name] for name in names]


def _is_transform(name: str) -> bool:
    return name in TRANSFORMS or name.startswith(_TRANSFORM)


def _transform_name(kind: _Kind) -> str:
    standard = (name for name, each in TRANSFORMS.items() if each is kind)
    return next(standard, f"{_TRANSFORM}{kind.__name__}")


def _describe_unknown(name: str, *, who: str = "this client") -> str:
    is_transform, own = name.startswith(_TRANSFORM), name.removeprefix(_TRANSFORM)
    what, argument = (
        ("transform", "transforms") if is_transform else ("local update", "local_updates")
    )
    return (
        f"the coordinator asks for the {what} {own!r}, which {who} does not know; pass its class "
        f"to the trainer, as in TorchTrainer.of(..., {argument}=[{own}])"
    )


def has_own_noise(settings: Settings) -> bool:
    """Return whether clients add their own noise, so that they must send nothing without noise."""
    return not _NOISED.isdisjoint(_names(settings))


def adds_own_noise(local: LocalUpdate, transforms: Sequence[Transform]) -> bool:
    """Return whether clients add their own noise; :func:`has_own_noise` tells it from settings."""
    components = (*iter_updates(local), *transforms)
    return any(isinstance(component, NoisedGradients | NoisedUpdates) for component in components)


def is_own(local: LocalUpdate) -> bool:
    """Return whether a custom class is part of an update."""
    standard = {*UPDATES.values(), ExtraSettings}
    return any(type(component) not in standard for component in iter_updates(local))


def own_classes(updates: Iterable[LocalUpdate]) -> list[_Kind]:
    """Return custom classes among updates; raise ConfigError if two have the same name."""
    standard = {*UPDATES.values(), ExtraSettings}
    kinds = (type(component) for each in updates for component in iter_updates(each))
    return _distinct((kind for kind in kinds if kind not in standard), what="local updates")


def own_transforms(transforms: Iterable[Transform]) -> list[type[Transform]]:
    """Return custom classes among transforms; raise ConfigError as :func:`own_classes`."""
    kinds = [type(each) for each in transforms if type(each) not in TRANSFORMS.values()]
    return _distinct(kinds, what="transforms")


def _distinct(kinds: Iterable[_Kind], *, what: str) -> list[_Kind]:
    found = dict[str, _Kind]()
    for kind in dict.fromkeys(kinds):
        if kind.__name__ in found:
            raise ConfigError(
                f"two {what} are called {kind.__name__!r}, {_place(found[kind.__name__])} and "
                f"{_place(kind)}; clients look them up by name, so rename one"
            )
        found[kind.__name__] = kind
    return list(found.values())


def _place(kind: _Kind) -> str:
    return f"{kind.__module__}.{kind.__qualname__}"


def settings_names(known: Collection[_Kind] = ()) -> frozenset[str]:
    """Return the field names of standard updates and ``known``, and ``known``'s class names."""
    kinds = (*UPDATES.values(), *known)
    fields_of_all = {name for kind in kinds for name in _fields(kind)}
    return frozenset(fields_of_all | {kind.__name__ for kind in known})


def require_honored(settings: Settings, honored: Collection[str], *, who: str) -> None:
    """Refuse settings that a trainer would ignore.

    Settings at their default are allowed, and so are transforms, which the session applies.

    Args:
        settings: Settings from the coordinator.
        honored: Names of the settings, and of updates without settings, that the trainer acts on.
        who: Name of the trainer in error messages.

    Raises:
        SettingsRefused: A setting would be ignored, or the names are a text or nothing.

    Example:
        >>> sgd = settings_of(LocalSgd(epochs=1, batch_size=8, learning_rate=0.1))
        >>> require_honored(sgd, {"epochs", "batch_size", "learning_rate"}, who="Mine")
    """
    # ("epochs") is a text: a part of it, such as "extra" of "extra.width", would count as a name.
    if isinstance(honored, str) or not isinstance(honored, Collection):
        raise SettingsRefused(
            f"{who} has honors = {honored!r}; give a tuple of names, such as "
            'honors = ("epochs",), or honors = () if it acts on no setting'
        )
    rest, extra = split_settings(settings)
    for name, value in extra.items():
        if EXTRA not in honored and f"{EXTRA}.{name}" not in honored:
            raise SettingsRefused(
                f"{who} does not honor the free-form setting {name!r}, which is {value!r}: act on "
                f'context.extra["{name}"] and add "{EXTRA}.{name}", or "{EXTRA}" for all, to the '
                "trainer's `honors`, or have the coordinator leave it out (client.extra)"
            )
    _require_known(settings, honored, who=who)
    left = {name: value for name, value in rest.items() if name != COMPONENTS}
    for name in _names(settings):
        kind = UPDATES.get(name) or TRANSFORMS.get(name)
        own = _fields(kind) if kind is not None else {}
        for field_name, field in own.items():
            if field_name not in left:  # the coordinator's version does not have the field
                continue
            value = left.pop(field_name)
            if name in UPDATES and value != field.default and field_name not in honored:
                raise _explain_ignored(field_name, value, who)
    of_work = _fields(LocalWork)  # fields that custom updates inherit
    for name, value in left.items():
        is_default = name in of_work and value == of_work[name].default
        if not (is_default or name in honored):
            raise _explain_ignored(name, value, who)


def _require_known(settings: Settings, honored: Collection[str], *, who: str) -> None:
    known = {*UPDATES, *TRANSFORMS, *honored}
    unknown = [name for name in _names(settings) if name not in known]
    if not unknown:
        return
    if settings_names() <= set(honored):  # fedlearn's own trainer, or a wrapper of it
        raise SettingsRefused(_describe_unknown(unknown[0]))
    name = unknown[0]
    raise SettingsRefused(
        f"{_describe_unknown(name, who=who)}; if your own trainer implements {name}, declare "
        f'"{name}" among the settings that it acts on; otherwise have the coordinator ask for '
        "another local update"
    )


def _build(kind: _Kind, values: Mapping[str, Scalar], **inner: LocalUpdate) -> Any:  # Any: as kinds
    try:
        return kind(**values, **inner)
    except ValueError as error:
        raise SettingsRefused(f"local setting out of range: {error}") from error


def _explain_ignored(name: str, value: Scalar, who: str) -> SettingsRefused:
    return SettingsRefused(
        f"{who} does not honor the setting {name!r}, which is {value!r}: act on "
        f'context.settings["{name}"] and add the name to the trainer\'s `honors`, or have the '
        "coordinator ask only for settings that it honors"
    )


def _name(kind: _Kind) -> str:
    standard = {**UPDATES, **TRANSFORMS}
    own = kind.__name__
    if own in standard and standard[own] is not kind:
        raise ConfigError(
            f"{_place(kind)} has the name of another component, {own!r}, and clients look "
            "components up by name; rename it"
        )
    return next((name for name, each in standard.items() if each is kind), own)


def _fields(kind: _Kind) -> dict[str, Field[Any]]:
    return {
        _TRAVELS_AS.get(field.name, field.name): field
        for field in fields(kind)
        if field.name != _INNER
    }


def _names(settings: Settings) -> list[str]:
    # A custom trainer may need no update, and so no names.
    named = settings.get(COMPONENTS, "")
    if not isinstance(named, str):
        raise SettingsRefused(
            f"local setting {COMPONENTS!r} is {named!r}; it must name the local update"
        )
    return named.split()


def _read_all(
    settings: Settings, known: Collection[_Kind]
) -> Iterator[tuple[str, _Kind, dict[str, Scalar]]]:
    # As in `_transform_kinds`, standard names win.
    kinds = {**{kind.__name__: kind for kind in known}, **UPDATES, **TRANSFORMS}
    unread = settings.keys() - {COMPONENTS}
    for name in _names(settings):
        if name not in kinds:
            raise SettingsRefused(_describe_unknown(name))
        yield name, kinds[name], _read(settings, kinds[name])
        unread -= _fields(kinds[name]).keys()
    if unread:
        components = settings.get(COMPONENTS)
        raise SettingsRefused(f"local setting {min(unread)!r} is unknown to {components!r}")


def _read(settings: Settings, kind: _Kind) -> dict[str, Scalar]:
    # A missing field keeps its default: the coordinator's version may not have it.
    own, hints = _fields(kind), get_type_hints(kind)
    present = [name for name in own if name in settings or own[name].default is MISSING]
    return {own[name].name: _read_one(settings, name, hints[own[name].name]) for name in present}


def _read_one(settings: Settings, name: str, hint: Any) -> Scalar:  # Any: a type
    if name not in settings:
        raise SettingsRefused(f"local setting {name!r} is missing")
    value = settings[name]
    allowed = get_args(hint) or (hint,)
    # A whole number is fine where a float is expected; `type` rather than isinstance, since bool is
    # an int.
    if type(value) is int and int not in allowed and float in allowed:
        return float(value)
    if type(value) not in allowed and not (value is None and NoneType in allowed):
        names = " or ".join(each.__name__ for each in allowed)
        raise SettingsRefused(f"local setting {name!r} is {value!r}, not of type {names}")
    return value
