"""`join --check` against a real gateway: which problems it finds."""

import asyncio
import json
import socket
import stat
from collections.abc import AsyncIterator, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, asynccontextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import pytest
from structlog.testing import capture_logs

from fedlearn.client import live_session
from fedlearn.client.diagnosis import CheckOutcome, Finding, diagnose, explain
from fedlearn.client.home import Home
from fedlearn.core.clock import SystemClock, VirtualClock, WallClock
from fedlearn.core.messages import ClientId
from fedlearn.gateway import server
from fedlearn.identity.identity import Invitation, expires_unix_s
from fedlearn.testing import FakeCoordinator
from fedlearn.transport import wire_pb2
from fedlearn.transport.grpc_client import GatewayConnection, GatewaySession, enrol
from tests.processes import until

SOURCE = """
class Trainer:
    num_examples = {num_examples}
    honors = ("epochs", "batch_size", "learning_rate")

    def train(self, tensors, *, context): ...
    def evaluate(self, tensors, *, control): ...
"""


@pytest.fixture
def coordinator() -> Iterator[FakeCoordinator]:
    with FakeCoordinator() as coordinator:
        yield coordinator


@pytest.fixture
def invitation(coordinator: FakeCoordinator) -> Path:
    return coordinator.invite("laptop")


@dataclass(frozen=True)
class WrongClock:
    """A device's clock that is off by some seconds."""

    by_s: float = 0.0

    def unix_s(self) -> float:
        return SystemClock().unix_s() + self.by_s


def run_diagnosis(
    invitation: Path,
    tmp_path: Path,
    *,
    trainer: str | None = None,
    clock: WallClock = WrongClock(),
) -> dict[str, Finding]:
    findings = diagnose(invitation, home=tmp_path / "home", trainer=trainer, clock=clock)
    return {finding.name: finding for finding in findings}


def enrolled(invitation: Path, tmp_path: Path) -> Home:
    """Redeem an invitation, as a joining client does."""
    home, invited = Home(tmp_path / "home"), Invitation.load(invitation)
    identity = home.keys.load_next_identity()
    address = invited.token_addresses[0]
    certificate_pem, client_id = asyncio.run(enrol(address, invited, identity))
    home.keys.enrol(invited, certificate_pem=certificate_pem, client_id=ClientId(client_id))
    return home


def changed(invitation: Path, **values: object) -> Path:
    """Return a copy of an invitation with other values."""
    copy = invitation.with_suffix(".changed")
    copy.write_text(json.dumps({**json.loads(invitation.read_text()), **values}))
    return copy


def test_what_is_as_it_must_be_is_fine(invitation: Path, tmp_path: Path) -> None:
    """All checks pass, and the token is not redeemed."""
    file = tmp_path / "trainer.py"
    file.write_text(SOURCE.format(num_examples=17))
    findings = run_diagnosis(invitation, tmp_path, trainer=f"{file}:Trainer")
    assert list(findings) == ["invitation", "disk", "connection", "TLS", "clock", "data"]
    assert all(finding.is_fine for finding in findings.values()), findings
    assert "17 examples" in findings["data"].message
    assert Home(tmp_path / "home").keys.load_enrolment() is None


def test_an_enrolled_client_tries_a_session(invitation: Path, tmp_path: Path) -> None:
    """A session is skipped while another process uses the folder."""
    home = enrolled(invitation, tmp_path)
    findings = run_diagnosis(invitation, tmp_path)
    assert findings["session"].message.startswith("welcome to run")
    assert findings["invitation"].message == "laptop is enrolled"
    assert {finding.outcome for finding in findings.values()} == {CheckOutcome.OK}
    with home.lock():
        findings = run_diagnosis(invitation, tmp_path)
    assert "in use" in findings["disk"].message
    assert "session" not in findings, "it would have ended that of the process that runs"


def test_a_look_changes_nothing(
    coordinator: FakeCoordinator, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Neither on disk, nor in the list of clients that may be asked."""
    invitation = coordinator.invite("laptop")
    findings = run_diagnosis(invitation, tmp_path)
    assert findings["disk"].is_fine
    assert not (tmp_path / "home").exists()
    home = enrolled(invitation, tmp_path)
    home.folder.chmod(0o755)
    there = sorted(home.folder.iterdir())
    seen: list[list[str]] = []

    class Watched(GatewayConnection):
        """A connection that records the connected clients during its session."""

        @asynccontextmanager
        async def session(self, hello: wire_pb2.Hello) -> AsyncIterator[GatewaySession]:
            async with super().session(hello) as session:
                seen.append(await asyncio.to_thread(coordinator.list_clients))
                yield session

    monkeypatch.setattr(live_session, "GatewayConnection", Watched)
    assert run_diagnosis(invitation, tmp_path)["session"].is_fine
    assert seen == [[]]
    assert stat.S_IMODE(home.folder.stat().st_mode) == 0o755
    assert sorted(home.folder.iterdir()) == there


def num_strangers(coordinator: FakeCoordinator) -> float:
    """Return the number of connections that are neither clients nor checks."""
    counted = coordinator.counters()
    return counted["connections"] - counted["authenticated"] - counted["looks"]


def test_a_look_is_no_strangers(
    coordinator: FakeCoordinator, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before and after joining. Control: an invitation without the keys of this deployment."""
    monkeypatch.setattr(server, "_REPORT_S", 0.0)
    invitation = coordinator.invite("laptop")
    with capture_logs() as logs:
        for _ in range(2):
            assert run_diagnosis(invitation, tmp_path)["TLS"].is_fine
        until(lambda: num_strangers(coordinator) == 0)  # counted after the client has its answer
        enrolled(invitation, tmp_path)
        assert run_diagnosis(invitation, tmp_path)["session"].is_fine
        until(lambda: num_strangers(coordinator) == 0)
        coordinator.revoke("laptop")  # returns once the gateway has checked its connections
        assert [each for each in logs if each["event"] == "strangers"] == []
    other = changed(coordinator.invite("desktop"), certificate_pem="", tls_key_pem="")
    with capture_logs() as logs:
        assert not run_diagnosis(other, tmp_path / "other")["connection"].is_fine
        until(lambda: num_strangers(coordinator) == 1)
        until(lambda: any(each["event"] == "strangers" for each in logs))


def test_an_invitation_that_is_not_open_is_found(
    coordinator: FakeCoordinator, tmp_path: Path
) -> None:
    """Because another client has used it, or its token is not valid."""
    used = coordinator.invite("laptop")
    enrolled(used, tmp_path)
    for each in (used, changed(coordinator.invite("desktop"), token="")):
        finding = run_diagnosis(each, tmp_path / "other")["invitation"]
        assert not finding.is_fine
        assert "unknown or was used" in finding.message


def through_a_proxy(
    invitation: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, *, status: bytes
) -> tuple[bytes, dict[str, Finding]]:
    """Check behind a proxy that answers with ``status``, at a name that only it can resolve."""
    port = json.loads(invitation.read_text())["addresses"][0].rpartition(":")[2]
    away = changed(invitation, addresses=[f"coordinator.invalid:{port}"])
    with socket.create_server(("127.0.0.1", 0)) as listening, ExitStack() as stack:

        def serve() -> bytes:
            client = stack.enter_context(listening.accept()[0])
            head = client.recv(1 << 16)
            client.sendall(b"HTTP/1.1 " + status + b"\r\n\r\n")
            if status.startswith(b"200"):
                gateway = stack.enter_context(socket.create_connection(("127.0.0.1", int(port))))
                back = stack.enter_context(ThreadPoolExecutor(1))
                back.submit(pump, gateway, client)
                pump(client, gateway)
            else:
                client.shutdown(socket.SHUT_WR)
            return head

        monkeypatch.setenv("https_proxy", f"http://127.0.0.1:{listening.getsockname()[1]}")
        with ThreadPoolExecutor(1) as proxy:
            request = proxy.submit(serve)
            findings = run_diagnosis(away, tmp_path)
            return request.result(), findings


def pump(source: socket.socket, sink: socket.socket) -> None:
    """Forward data until one side closes."""
    with suppress(OSError):
        while data := source.recv(1 << 16):
            sink.sendall(data)
    with suppress(OSError):
        sink.shutdown(socket.SHUT_WR)


def test_a_proxy_is_passed_as_in_joining(
    invitation: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Only the proxy can resolve the name. If it refuses, the finding says so."""
    head, findings = through_a_proxy(invitation, tmp_path, monkeypatch, status=b"200 OK")
    assert head.startswith(b"CONNECT coordinator.invalid:")
    assert all(finding.is_fine for finding in findings.values()), findings
    assert {"connection", "TLS", "clock"} <= set(findings)
    _, findings = through_a_proxy(invitation, tmp_path, monkeypatch, status=b"407 No")
    assert "answers 407" in findings["proxy"].message
    assert not findings["proxy"].is_fine


def test_a_folder_that_cannot_be_used_is_found(invitation: Path, tmp_path: Path) -> None:
    """Here a file is in its place."""
    (tmp_path / "home").write_text("in the way")
    finding = run_diagnosis(invitation, tmp_path)["disk"]
    assert not finding.is_fine
    assert "is a file" in finding.message


def test_the_clock_is_named_once(invitation: Path, tmp_path: Path) -> None:
    """Although both addresses show it. Control: their certificates are two findings."""
    address = json.loads(invitation.read_text())["addresses"][0]
    twice = changed(invitation, addresses=[address, address])
    names = [finding.name for finding in diagnose(twice, home=tmp_path / "home", trainer=None)]
    assert (names.count("clock"), names.count("TLS")) == (1, 2)


def test_keys_that_are_to_be_replaced_are_not_tried(
    coordinator: FakeCoordinator, tmp_path: Path
) -> None:
    """A revoked client has a new invitation. Control: with the old one, its keys are tried."""
    invitation = coordinator.invite("laptop")
    enrolled(invitation, tmp_path)
    coordinator.revoke("laptop")
    assert "session" in run_diagnosis(invitation, tmp_path)
    findings = run_diagnosis(coordinator.invite("laptop"), tmp_path)
    assert "will enrol again" in findings["invitation"].message
    assert "session" not in findings


def test_a_revoked_client_hears_it(coordinator: FakeCoordinator, tmp_path: Path) -> None:
    """In the coordinator's words."""
    invitation = coordinator.invite("laptop")
    enrolled(invitation, tmp_path)
    coordinator.revoke("laptop")
    clock = SystemClock()
    until_s = clock.now_s() + 60.0
    while (
        finding := run_diagnosis(invitation, tmp_path)["session"]
    ).is_fine:  # the gateway polls each second
        assert clock.now_s() < until_s, "the gateway still lets it in"
    assert "revoked" in finding.message


def test_an_address_where_nobody_listens_is_found(invitation: Path, tmp_path: Path) -> None:
    """Or that is not an address."""
    for address in ("127.0.0.1:1", "nonsense"):
        finding = run_diagnosis(changed(invitation, addresses=[address]), tmp_path)["connection"]
        assert not finding.is_fine
        assert address in finding.message


def test_another_coordinators_certificate_is_found(invitation: Path, tmp_path: Path) -> None:
    """The client trusts the authority of its invitation and no other."""
    with FakeCoordinator() as another:
        address = another.address
        finding = run_diagnosis(changed(invitation, addresses=[address]), tmp_path)["TLS"]
        assert not finding.is_fine
        assert "not the coordinator of this invitation" in finding.message


@pytest.mark.parametrize("verb", ["has expired", "is not yet valid"])
def test_a_clock_outside_the_certificates_time_is_told_as_such(verb: str) -> None:
    """Recognized by gRPC's error message."""
    error = f"UNAVAILABLE: SSL routines: CERTIFICATE_VERIFY_FAILED: certificate {verb}: OK"
    finding = explain("fl.example.org:443", error, now="2020-01-01T00:00:00Z")
    assert (finding.name, finding.is_fine) == ("clock", False)
    assert f"certificate {verb} at 2020-01-01T00:00:00Z by this device's clock" in finding.message


@pytest.mark.parametrize(
    ("by_s", "outcome", "words"),
    [
        (50.0, CheckOutcome.OK, "within 60 s"),
        (3600.0, CheckOutcome.WARNING, "s ahead of the coordinator's; set it"),
        (-3600.0, CheckOutcome.WARNING, "s behind the coordinator's; set it"),
    ],
)
def test_a_clock_that_is_off_is_a_warning_and_no_obstacle(
    invitation: Path, tmp_path: Path, by_s: float, outcome: CheckOutcome, words: str
) -> None:
    """Measured against the coordinator's clock, which its welcome contains."""
    enrolled(invitation, tmp_path)
    finding = run_diagnosis(invitation, tmp_path, clock=WrongClock(by_s))["clock offset"]
    assert (finding.outcome, finding.is_fine) == (outcome, True)
    assert words in finding.message


def test_a_certificate_that_ends_soon_is_a_warning(
    coordinator: FakeCoordinator, tmp_path: Path
) -> None:
    """With the remedy. A new invitation for the enrolled client is recognized as such."""
    invitation = coordinator.invite("laptop")
    home = enrolled(invitation, tmp_path)
    enrolment = home.keys.load_enrolment()
    assert enrolment is not None
    left_s = expires_unix_s(enrolment.certificate_pem) - SystemClock().unix_s()
    clock = WrongClock(left_s - 10 * 86_400.0)
    finding = run_diagnosis(invitation, tmp_path, clock=clock)["invitation"]
    assert finding.outcome is CheckOutcome.WARNING
    assert "fedlearn invite laptop" in finding.message
    finding = run_diagnosis(coordinator.invite("laptop"), tmp_path)["invitation"]
    assert "laptop is enrolled here" in finding.message


def test_a_clock_that_is_years_off_is_found(invitation: Path, tmp_path: Path) -> None:
    """By the invitation's dates, even if other checks fail."""
    finding = run_diagnosis(invitation, tmp_path, clock=VirtualClock(4e9))["invitation"]
    assert not finding.is_fine
    assert "this clock says" in finding.message


def test_a_file_that_is_no_invitation_ends_the_search(tmp_path: Path) -> None:
    """Without an invitation nothing else can be checked."""
    (tmp_path / "file").write_text("{}")
    findings = run_diagnosis(tmp_path / "file", tmp_path)
    assert [finding.is_fine for finding in findings.values()] == [False]


@pytest.mark.parametrize(
    ("num_examples", "words"), [(0, "has 0 examples"), (None, "no class or function")]
)
def test_data_that_is_not_there_is_found(
    invitation: Path, tmp_path: Path, num_examples: int | None, words: str
) -> None:
    """An empty data set, or no trainer."""
    file = tmp_path / "trainer.py"
    file.write_text("" if num_examples is None else SOURCE.format(num_examples=num_examples))
    finding = run_diagnosis(invitation, tmp_path, trainer=f"{file}:Trainer")["data"]
    assert not finding.is_fine
    assert words in finding.message


TORCH_SOURCE = """import os
import torch
from torch import nn
from fedlearn.client import TorchTrainer

def narrow():
    return TorchTrainer.of(lambda: nn.Linear(64, 2), torch.zeros(9, 63), torch.zeros(9).long())

def fits():
    return TorchTrainer.of(lambda: nn.Linear(64, 2), torch.zeros(9, 64), torch.zeros(9).long())

def unset():
    return os.environ["FEDLEARN_NO_SUCH_VARIABLE"]
"""


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("narrow", "RuntimeError: mat1 and mat2 shapes cannot be multiplied"),
        ("fits", None),
        ("unset", "trainer.py:13, in unset: KeyError: 'FEDLEARN_NO_SUCH_VARIABLE'; fix"),
    ],
)
def test_data_that_the_model_does_not_take_are_found(
    invitation: Path, tmp_path: Path, name: str, words: str | None
) -> None:
    """A trainer that cannot be built is found too, with its line, and nothing is raised."""
    file = tmp_path / "trainer.py"
    file.write_text(TORCH_SOURCE)
    finding = run_diagnosis(invitation, tmp_path, trainer=f"{file}:{name}")["data"]
    assert finding.is_fine == (words is None)
    assert (words or "has 9 examples") in finding.message
