"""When a device may train: on mains power, idle, on an unmetered network, at night."""

import math
import os
import re
import shutil
import subprocess
import sys
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated, TypeAlias

import psutil
from annotated_types import doc

from fedlearn.core.clock import Clock
from fedlearn.errors import ConfigError

#: Checks one fact about the device; returns ``None`` if it cannot tell.
Probe: TypeAlias = Callable[[], bool | None]

#: A device is idle while other programs use less than this share of its processors.
_IDLE_SHARE = 0.25
#: Seconds over which that share is averaged.
_IDLE_WINDOW_S = 10.0
_IDLE_SHORTEST_S = 0.5
#: CPU times that are not work of this machine (idle, iowait, steal), or that are counted twice:
#: guest time is part of user time.
_NOT_BUSY = frozenset({"idle", "iowait", "steal", "guest", "guest_nice"})
#: The first CPU times of a process: user, system, and both of its children that have exited.
_NUM_TIMES = 4
#: Seconds for which facts from the application stay valid: a probe may be slow, but not hang.
_REPORT_VALID_S = 10.0
#: Seconds for which NetworkManager's answer is cached.
_METERED_AGE_S = 30.0
_TIME = re.compile(r"([01]\d|2[0-3]):([0-5]\d)")
_NETWORK_MANAGER = "org.freedesktop.NetworkManager"


@dataclass(frozen=True, kw_only=True)
class Facts:
    """What is currently known about the device; ``None`` means unknown.

    Attributes:
        on_power: Whether it runs on mains power.
        idle: Whether it is not in use.
        unmetered: Whether its network is not billed by volume.
    """

    on_power: bool | None = None
    idle: bool | None = None
    unmetered: bool | None = None

    def select_known(self) -> dict[str, bool]:
        """List the facts that are not unknown, by name."""
        return {name: value for name, value in vars(self).items() if value is not None}


@dataclass(frozen=True, kw_only=True)
class Probes:
    """Functions by which the application overrides what the operating system reports.

    They are polled in the application's process. Each determines the fact of the same name in
    :class:`Facts`; without one, or if it returns ``None``, the operating system is asked.
    """

    on_power: Probe | None = None
    idle: Probe | None = None
    unmetered: Probe | None = None

    def poll(self) -> Facts:
        """Call all probes that are set."""
        return Facts(**{name: probe() for name, probe in vars(self).items() if probe is not None})


@dataclass(frozen=True, kw_only=True)
class Conditions:
    """What must hold before and during training.

    Raises:
        ConfigError: ``between`` is not two different times of day.

    Example:
        >>> night = Conditions(on_power=True, between=("22:00", "06:00"))
        >>> night.find_unmet(Facts(on_power=True), local=datetime(2026, 1, 1, 23, 30))
        ()
        >>> night.find_unmet(Facts(), local=datetime(2026, 1, 1, 6, 0))
        ('on_power (unknown)', 'between 22:00 and 06:00')
    """

    on_power: Annotated[bool, doc("Whether to train only on mains power.")] = False
    idle: Annotated[bool, doc("Whether to train only while the device is not in use.")] = False
    unmetered: Annotated[
        bool, doc("Whether to train only on a network that is not billed by volume.")
    ] = False
    between: Annotated[
        tuple[str, str] | None,
        doc(
            'Train only between these two local times, such as ``("22:00", "06:00")``; the period '
            "spans midnight if the second time is earlier."
        ),
    ] = None

    def __post_init__(self) -> None:
        if self.between is None:
            return
        if not all(_TIME.fullmatch(each) for each in self.between):
            raise ConfigError(
                f"conditions.between is {self.between!r}; give two times of day, such as "
                '("22:00", "06:00")'
            )
        if self.between[0] == self.between[1]:
            raise ConfigError(
                f"conditions.between is {self.between!r}, which is an empty period; leave it out "
                "to train at any time"
            )

    def find_unmet(self, facts: Facts, *, local: datetime) -> tuple[str, ...]:
        """Describe each condition that does not hold; one that is unknown does not hold."""
        unmet = []
        for name in ("on_power", "idle", "unmetered"):
            value = getattr(facts, name)
            if getattr(self, name) and not value:
                unmet.append(f"{name} (unknown)" if value is None else name)
        if self.between is not None and not _is_between(self.between, local):
            unmet.append(f"between {self.between[0]} and {self.between[1]}")
        return tuple(unmet)


def _is_between(between: tuple[str, str], local: datetime) -> bool:
    begin, end = between
    now = f"{local.hour:02d}:{local.minute:02d}"  # zero-padded, so strings compare like times
    return begin <= now < end if begin < end else now >= begin or now < end


def local_time(unix_s: float) -> datetime:
    """Convert seconds since 1970 to a time in this device's time zone."""
    return datetime.fromtimestamp(unix_s, tz=UTC).astimezone()


@dataclass
class Device:
    """Finds out facts about the device from the operating system and the application.

    Facts from the application take precedence.

    Attributes:
        clock: Measures how old an answer is.
        power_supplies: Where Linux lists mains adapters and batteries.
    """

    clock: Clock
    power_supplies: Path = Path("/sys/class/power_supply")
    _load: deque[tuple[float, float, float]] = field(default_factory=deque)
    _metered: tuple[float, bool | None] | None = None
    _reported: tuple[float, Facts] = (-math.inf, Facts())

    def set_facts(self, facts: Facts) -> None:
        """Store facts from the application; they stay valid for a few seconds."""
        self._reported = self.clock.now_s(), facts

    def gather_facts(self) -> Facts:
        """Find out all facts; call this about once a second, on a thread, since it may block."""
        found = self.query_system()
        reported_s, reported = self._reported
        if self.clock.now_s() - reported_s > _REPORT_VALID_S:
            return found
        return replace(found, **reported.select_known())

    def query_system(self) -> Facts:
        """Ask the operating system for the facts that it knows."""
        return Facts(
            on_power=self._has_mains_power(), idle=self._is_idle(), unmetered=self._is_unmetered()
        )

    def _has_mains_power(self) -> bool | None:
        """Check for mains power; a device without a battery is always on it."""
        if sys.platform == "linux":  # psutil mistakes a mouse's battery for the machine's
            return _is_on_power(self.power_supplies)
        else:
            battery = psutil.sensors_battery()
            return True if battery is None else battery.power_plugged

    def _is_idle(self) -> bool | None:
        """Check that other programs than this process and its children use little CPU time."""
        busy_s, own_s, now_s = _read_busy_s(), _read_own_s(), self.clock.now_s()
        self._load.append((now_s, busy_s, own_s))
        while now_s - self._load[1 if len(self._load) > 1 else 0][0] >= _IDLE_WINDOW_S:
            self._load.popleft()
        then_s, busy_then_s, own_then_s = self._load[0]
        if now_s - then_s < _IDLE_SHORTEST_S:
            return None  # too short to tell: the kernel counts in hundredths of a second
        others_s = (busy_s - busy_then_s) - (own_s - own_then_s)
        return others_s < _IDLE_SHARE * (os.cpu_count() or 1) * (now_s - then_s)

    def _is_unmetered(self) -> bool | None:
        now_s = self.clock.now_s()
        if self._metered is None or now_s - self._metered[0] > _METERED_AGE_S:
            self._metered = (now_s, _ask_network_manager())
        return self._metered[1]


def _is_on_power(power_supplies: Path) -> bool | None:
    try:
        supplies = sorted(power_supplies.iterdir())
    except OSError:
        return None
    kinds = [(_read_line(each / "type"), each) for each in supplies]
    mains = [_read_line(each / "online") == "1" for kind, each in kinds if kind != "Battery"]
    batteries = [
        _read_line(each / "status") == "Discharging"
        for kind, each in kinds
        # The scope of a mouse's battery is "Device".
        if kind == "Battery" and _read_line(each / "scope") != "Device"
    ]
    return any(mains) or not any(batteries)


def _read_busy_s() -> float:
    """Return the CPU seconds that all processors have worked since boot."""
    times = psutil.cpu_times()._asdict()
    return math.fsum(seconds for name, seconds in times.items() if name not in _NOT_BUSY)


def _read_own_s() -> float:
    """Return the CPU seconds used by this process and its descendants.

    Descendants count because a trainer may load its data in worker processes.
    """
    used_s = 0.0
    for each in _iterate_family(psutil.Process()):
        with suppress(psutil.Error):  # it has just exited
            used_s += sum(each.cpu_times()[:_NUM_TIMES])
    return used_s


def _iterate_family(process: psutil.Process) -> Iterator[psutil.Process]:
    yield process
    if sys.platform == "linux":
        # psutil would scan every process of the machine: 5 ms per hundred of them, every second.
        for pid in _list_child_pids(process.pid):
            with suppress(psutil.Error):  # it has just exited
                yield from _iterate_family(psutil.Process(pid))
    else:
        yield from process.children(recursive=True)


def _list_child_pids(pid: int) -> list[int]:
    """List the child process ids of a process on Linux; empty if it has just exited."""
    try:
        threads = list(Path(f"/proc/{pid}/task").iterdir())
    except OSError:
        return []
    return [int(each) for thread in threads for each in _read_line(thread / "children").split()]


def _read_line(path: Path) -> str:
    try:
        return path.read_text().partition("\n")[0]
    except OSError:
        return ""


def _ask_network_manager() -> bool | None:
    """Ask NetworkManager if the network is unmetered; ``None`` if it is absent or cannot tell."""
    program = shutil.which("busctl")
    if program is None:
        return None
    path = "/" + _NETWORK_MANAGER.replace(".", "/")
    question = [program, "get-property", _NETWORK_MANAGER, path, _NETWORK_MANAGER, "Metered"]
    try:
        answer = subprocess.run(question, capture_output=True, text=True, timeout=2.0, check=False)  # noqa: S603 - fixed words
    except (OSError, subprocess.TimeoutExpired):
        return None
    # NMMetered: 1 yes, 2 no, 3 guessed yes, 4 guessed no
    return {"u 1": False, "u 2": True, "u 3": False, "u 4": True}.get(answer.stdout.strip())
