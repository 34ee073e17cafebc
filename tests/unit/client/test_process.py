"""Starting the training process."""

import json
import multiprocessing
import multiprocessing.spawn
import os
import signal
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from fedlearn.client.conditions import Conditions, Facts
from fedlearn.client.events import EventKind
from fedlearn.client.options import Resources, RuntimeOptions
from fedlearn.client.policy import Policy
from fedlearn.client.process import TrainingProcess, find_interpreter
from fedlearn.core.clock import SystemClock
from fedlearn.errors import DeploymentError


@pytest.fixture
def _named_again() -> Iterator[None]:
    """Restore multiprocessing's interpreter."""
    named = os.fsdecode(multiprocessing.spawn.get_executable())
    yield
    multiprocessing.set_executable(named)


def test_a_training_process_runs_in_the_applications_python() -> None:
    assert find_interpreter() == sys.executable


def test_messages_of_several_threads_do_not_mix() -> None:
    """Although a message is sent in parts: conditions are watched in a thread of their own."""
    sent = list[bytes]()

    class LinkInParts:
        def sendall(self, data: bytes) -> None:
            for part in (data[:7], data[7:]):
                sent.append(part)
                SystemClock().sleep(0.005)

    unused: Any = None
    link: Any = LinkInParts()
    child = TrainingProcess(process=unused, link=link, mark="", _family=unused)
    threads = [threading.Thread(target=child.send, args=(Facts(idle=True),)) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    lines = b"".join(sent).splitlines()
    assert [json.loads(line)["Facts"]["idle"] for line in lines] == [True] * 4


@pytest.mark.usefixtures("_named_again")
@pytest.mark.parametrize(
    ("program", "is_frozen"), [("/usr/bin/uwsgi", False), ("/app/python", True)]
)
def test_an_application_that_is_its_own_interpreter_is_not_started_again(
    monkeypatch: pytest.MonkeyPatch, program: str, *, is_frozen: bool
) -> None:
    """It would start itself over and over; it may name an interpreter instead."""
    monkeypatch.setattr(sys, "executable", program)
    monkeypatch.setattr(sys, "frozen", is_frozen, raising=False)
    multiprocessing.set_executable(program)
    with pytest.raises(DeploymentError, match=f"{program}.*multiprocessing.set_executable"):
        find_interpreter()
    multiprocessing.set_executable("/opt/app/bin/python3")
    assert find_interpreter() == "/opt/app/bin/python3"


@pytest.fixture
def options(tmp_path: Path) -> RuntimeOptions:
    """Options of a client whose trainer does not exist."""
    return RuntimeOptions(
        home=tmp_path / "home",
        trainer="no.such:Trainer",
        invitation=None,
        conditions=Conditions(),
        policy=Policy(),
        resources=Resources(niceness=0),
    )


@pytest.mark.slow
def test_nothing_is_imported_from_the_working_directory(
    options: RuntimeOptions, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An application may be started in a downloads folder. The process's error is reported."""
    (tmp_path / "structlog.py").write_text("open('imported', 'w').close()\nraise SystemExit(7)\n")
    monkeypatch.chdir(tmp_path)
    child = TrainingProcess.start(options, python=sys.executable)
    try:
        (event,) = child.events()
        assert (event.kind, event.is_final) == (EventKind.FAILED, True)
        assert "no module no.such" in event.message
        assert child.end() == 0
    finally:
        child.link.close()
    assert not (tmp_path / "imported").exists()


@pytest.mark.linux
def test_a_process_has_ended_although_what_it_started_holds_the_socket(
    options: RuntimeOptions, tmp_path: Path
) -> None:
    """Events sent before are received; lines that are not events are ignored."""
    worker, ended = tmp_path / "worker", tmp_path / "ended"
    program = tmp_path / "python"
    program.write_text(f"""#!{sys.executable}
import os, socket, subprocess, sys
fileno = int(sys.argv[-1])
program = "import time; time.sleep(60); open({str(ended)!r}, 'w')"
worker = subprocess.Popen([sys.executable, "-c", program], pass_fds=[fileno])
open({str(worker)!r}, "w").write(str(worker.pid))
link = socket.socket(fileno=fileno)
link.sendall(b'{{"kind": "from tomorrow"}}\\n{{"kind": "waiting"}}\\n')
os._exit(5)
""")
    program.chmod(0o700)
    child = TrainingProcess.start(options, python=str(program))
    try:
        assert [event.kind for event in child.events()] == [EventKind.WAITING]
        assert child.end() == 5
    finally:
        child.link.close()
        os.kill(int(worker.read_text()), signal.SIGKILL)
    assert not ended.exists()
