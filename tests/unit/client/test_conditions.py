"""Facts about a device, and the conditions under which it trains."""

import subprocess
import sys
from datetime import datetime
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from fedlearn.client.conditions import Conditions, Device, Facts, Probes, local_time
from fedlearn.core.clock import SystemClock, VirtualClock
from fedlearn.errors import ConfigError

NOON = datetime(2026, 6, 1, 12, 0)  # noqa: DTZ001 - local


@pytest.mark.parametrize("name", ["on_power", "idle", "unmetered"])
@pytest.mark.parametrize(
    ("value", "words"), [(True, ()), (False, ("{}",)), (None, ("{} (unknown)",))]
)
def test_what_is_required_must_be_known_to_hold(
    name: str, value: object, words: tuple[str, ...]
) -> None:
    """An unknown fact counts as not met, and is reported as unknown. Other facts do not matter."""
    settings: dict[str, Any] = {name: True}  # Any: mypy cannot know which field
    found: dict[str, Any] = {name: value}
    required, facts = Conditions(**settings), Facts(**found)
    assert required.find_unmet(facts, local=NOON) == tuple(each.format(name) for each in words)
    assert Conditions().find_unmet(facts, local=NOON) == ()


@pytest.mark.parametrize(
    ("between", "time", "holds"),
    [
        (("09:00", "17:00"), (9, 0), True),
        (("09:00", "17:00"), (16, 59), True),
        (("09:00", "17:00"), (17, 0), False),
        (("09:00", "17:00"), (8, 59), False),
        (("22:00", "06:00"), (22, 0), True),
        (("22:00", "06:00"), (23, 59), True),
        (("22:00", "06:00"), (0, 0), True),
        (("22:00", "06:00"), (5, 59), True),
        (("22:00", "06:00"), (6, 0), False),
        (("22:00", "06:00"), (12, 0), False),
    ],
)
def test_times_of_day_may_pass_midnight(
    between: tuple[str, str], time: tuple[int, int], holds: object
) -> None:
    """The start time is included, the end time is not."""
    local = NOON.replace(hour=time[0], minute=time[1])
    assert (Conditions(between=between).find_unmet(Facts(), local=local) == ()) is holds


@pytest.mark.parametrize("between", [("9:00", "17:00"), ("22:00", "24:00"), ("08:00", "08:00")])
def test_times_that_are_none_are_refused(between: tuple[str, str]) -> None:
    with pytest.raises(ConfigError, match=r"conditions\.between"):
        Conditions(between=between)


def test_local_time_is_that_of_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    assert local_time(0.0).utcoffset() == local_time(0.0).astimezone().utcoffset()


def supplies(folder: Path, **kinds: dict[str, str]) -> Path:
    """Write files as the kernel shows them for power supplies."""
    for name, files in kinds.items():
        (folder / name).mkdir(parents=True)
        for file, text in files.items():
            (folder / name / file).write_text(f"{text}\n")
    folder.mkdir(exist_ok=True)
    return folder


MAINS_IN, MAINS_OUT = {"type": "Mains", "online": "1"}, {"type": "Mains", "online": "0"}
FULL, DRAINING = {"type": "Battery", "status": "Full"}, {"type": "Battery", "status": "Discharging"}
MOUSE = {**DRAINING, "scope": "Device"}


@pytest.mark.parametrize(
    ("kinds", "on_power"),
    [
        ({"AC": MAINS_IN, "BAT0": FULL}, True),
        ({"AC": MAINS_OUT, "BAT0": DRAINING}, False),
        ({"BAT0": DRAINING}, False),
        ({"BAT0": FULL}, True),
        ({}, True),
        ({"AC": MAINS_IN, "hid": MOUSE}, True),
        ({"hid": MOUSE}, True),
    ],
)
@pytest.mark.linux
def test_power_is_read_from_the_kernel(
    tmp_path: Path, kinds: dict[str, dict[str, str]], on_power: object
) -> None:
    """A mouse's battery does not count; a machine without a battery is on mains power."""
    folder = supplies(tmp_path / "power_supply", **kinds)
    assert Device(VirtualClock(), power_supplies=folder).gather_facts().on_power is on_power


@pytest.mark.linux
def test_what_the_kernel_does_not_show_is_unknown(tmp_path: Path) -> None:
    """As on another operating system."""
    nowhere = tmp_path / "nothing"
    assert Device(VirtualClock(), power_supplies=nowhere).gather_facts().on_power is None


class Processors(NamedTuple):
    """Processor times as psutil returns them."""

    user: float
    idle: float = 0.0
    iowait: float = 0.0


def test_a_device_is_idle_while_others_use_little_of_its_processors(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Unknown at first; then measured over a window of several seconds."""
    monkeypatch.setattr("os.cpu_count", lambda: 2)
    clock = VirtualClock()
    device = Device(clock)
    busy_s = 0.0
    seen = []
    for used_s in (0, *[0] * 5, *[2] * 12, *[0] * 12):
        busy_s += used_s
        times = Processors(user=busy_s, idle=clock.now_s(), iowait=clock.now_s())
        monkeypatch.setattr("psutil.cpu_times", lambda times=times: times)
        seen.append(device.gather_facts().idle)
        clock.sleep(1.0)
    assert seen[0] is None
    assert seen[1:6] == [True] * 5
    assert seen[17] is False
    assert seen[-1] is True


#: A worker uses half a second of processor time, prints a line, and waits; a loader starts it.
WORKER = """
import os
while os.times().user < 0.5:
    pass
print("done", flush=True)
input()
"""
LOADER = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {WORKER!r}])"


@pytest.mark.parametrize("is_own", [True, False])
def test_what_a_trainers_own_processes_use_is_not_somebody_elses(
    monkeypatch: pytest.MonkeyPatch, *, is_own: bool
) -> None:
    """Data loaders and their child processes do not count. Control: other processes' use does."""
    monkeypatch.setattr("os.cpu_count", lambda: 1)
    clock = VirtualClock()
    device = Device(clock)
    monkeypatch.setattr("psutil.cpu_times", lambda: Processors(user=0.0))
    device.gather_facts()
    clock.sleep(1.0)
    monkeypatch.setattr("psutil.cpu_times", lambda: Processors(user=0.5))
    if not is_own:
        assert device.gather_facts().idle is False
        return
    with subprocess.Popen(
        [sys.executable, "-c", LOADER], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        assert process.stdin is not None
        process.stdout.readline()
        assert device.gather_facts().idle is True
        process.stdin.write("\n")


def test_probes_are_asked_and_may_not_know() -> None:
    """Facts without a probe, or whose probe returns None, are unknown."""
    probes = Probes(idle=lambda: True, unmetered=lambda: None)
    assert probes.poll() == Facts(idle=True)


@pytest.mark.linux
def test_what_the_application_tells_holds_while_a_probe_takes_its_time(tmp_path: Path) -> None:
    """A slow probe must not make conditions flap; if it hangs, the fact becomes unknown."""
    clock, nowhere = VirtualClock(), tmp_path / "nothing"
    device = Device(clock, power_supplies=nowhere)
    device.set_facts(Facts(on_power=True))
    clock.sleep(9.0)
    assert device.gather_facts().on_power is True
    device.set_facts(Facts(on_power=False))
    clock.sleep(9.0)
    assert device.gather_facts().on_power is False
    clock.sleep(2.0)
    assert device.gather_facts().on_power is None


@pytest.mark.slow
@pytest.mark.linux
def test_processes_that_end_meanwhile_do_not_end_the_survey() -> None:
    """Data-loading processes come and go; some end while the survey reads them."""
    shells = [subprocess.Popen(["/bin/sh", "-c", "while :; do /bin/true; done"]) for _ in range(2)]
    try:
        device = Device(SystemClock())
        for _ in range(1000):
            device.query_system()
    finally:
        for each in shells:
            each.kill()
            each.wait()
