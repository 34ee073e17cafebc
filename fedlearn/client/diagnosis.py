"""Check a device before it joins: address, TLS, clock, disk and data.

The checks connect with the client's own code, so that proxies affect both in the same way.
"""

import asyncio
import os
import re
import shutil
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from enum import StrEnum
from itertools import chain
from pathlib import Path

from fedlearn.client.home import Home
from fedlearn.client.keyring import Enrolment
from fedlearn.client.live_session import session_at
from fedlearn.client.loading import make_trainer
from fedlearn.core.clock import SystemClock, WallClock, utc
from fedlearn.core.software import SOFTWARE
from fedlearn.errors import ConnectionRefused, DeploymentError, FedlearnError, ProtocolError
from fedlearn.identity.identity import Invitation
from fedlearn.session.faults import convert_trainer_errors
from fedlearn.transport import wire_pb2
from fedlearn.transport.grpc_client import look

_CLOCK = SystemClock()
_TIMEOUT_S = 10.0
#: Clock difference above which to warn.
_MAX_OFFSET_S = 60.0
#: Room for the request, the reply and the checkpoints of a model of 100 million parameters.
_ENOUGH_BYTES = 2 << 30
#: Where gRPC looks for a proxy, in this order.
_PROXY_VARIABLES = ("grpc_proxy", "https_proxy", "http_proxy")
#: Patterns in gRPC's error messages.
_CLOCK_WRONG = re.compile(r"certificate (has expired|is not yet valid)")
_PROXY_REFUSES = re.compile(r"HTTP proxy returned response code (\d+)")


class CheckOutcome(StrEnum):
    """The outcome of one check."""

    OK = "ok"
    WARNING = "warn"  # should be fixed, but does not prevent joining
    BAD = "BAD"


@dataclass(frozen=True)
class Finding:
    """The result of one check: its name, its outcome, and a message with the remedy."""

    name: str
    outcome: CheckOutcome
    message: str

    @property
    def is_fine(self) -> bool:
        """Whether this device can take part in spite of it."""
        return self.outcome is not CheckOutcome.BAD


def diagnose(
    invitation: Path,
    *,
    home: Path,
    trainer: str | None,
    addresses: tuple[str, ...] = (),
    clock: WallClock = _CLOCK,
) -> Iterator[Finding]:
    """Run all checks, and yield each result; this neither joins nor redeems the invitation.

    Args:
        invitation: The invitation file.
        home: The client's folder, which need not exist.
        trainer: Name of the trainer; ``None`` skips the check of the data.
        addresses: Addresses of the coordinator to check instead of the known ones.
        clock: This device's clock.
    """
    try:
        invited = Invitation.load(invitation)
        enrolment = Home(home).keys.load_enrolment()
    except DeploymentError as error:
        yield Finding("invitation", CheckOutcome.BAD, str(error))
        return
    yield _check_invitation(invited, enrolment, now_unix_s=clock.unix_s())
    disk = _check_disk(home)
    yield disk
    if enrolment is None or not enrolment.has_redeemed(invited):
        looks = (
            _check_connection(each, invited, clock) for each in addresses or invited.token_addresses
        )
        yield from _drop_repeated_clock(chain.from_iterable(looks))
    elif disk.is_fine:  # not if the folder is in use: this would end the running client's session
        yield from _check_session(enrolment, addresses or enrolment.invitation.addresses, clock)
    if trainer is not None:
        yield _check_data(trainer)


def _check_invitation(
    invited: Invitation, enrolment: Enrolment | None, *, now_unix_s: float
) -> Finding:
    if enrolment is not None and enrolment.has_redeemed(invited):
        advice = enrolment.describe_renewal(now_unix_s=now_unix_s)
        outcome = CheckOutcome.OK if advice is None else CheckOutcome.WARNING
        return Finding("invitation", outcome, advice or f"{invited.name} is enrolled")
    now = utc(now_unix_s)
    if invited.expires_utc < now:  # both ISO 8601 in UTC, so strings compare like times
        words = f"expired at {invited.expires_utc}; this clock says {now}; ask for a new one"
        return Finding("invitation", CheckOutcome.BAD, words)
    words = f"for {invited.name}, until {invited.expires_utc}"
    if enrolment is not None:
        words += f"; {enrolment.invitation.name} is enrolled here and will enrol again"
    return Finding("invitation", CheckOutcome.OK, words)


def _drop_repeated_clock(findings: Iterable[Finding]) -> Iterator[Finding]:
    """Drop repeated findings about the clock, which the certificate of each address yields."""
    said = set[CheckOutcome]()
    for finding in findings:
        if finding.name != "clock":
            yield finding
        elif finding.outcome not in said:
            said.add(finding.outcome)
            yield finding


def _check_disk(home: Path) -> Finding:
    place = next(each for each in (home, *home.absolute().parents) if each.is_dir())
    if (obstacle := _find_obstacle(home, place)) is not None:
        return Finding("disk", CheckOutcome.BAD, obstacle)
    free_bytes = shutil.disk_usage(place).free
    words = f"{free_bytes / 2**30:.1f} GiB free in {place}"
    if free_bytes >= _ENOUGH_BYTES:
        return Finding("disk", CheckOutcome.OK, words)
    words += f"; free {_ENOUGH_BYTES / 2**30:.0f} GiB, or less for a small model"
    return Finding("disk", CheckOutcome.BAD, words)


def _find_obstacle(home: Path, place: Path) -> str | None:
    """Describe why a client cannot work in ``home``, without changing anything there.

    ``place`` is the innermost folder on its path that exists. ``None`` means no obstacle.
    """
    if home.exists() and place != home:
        return f"{home} is a file; name a folder"
    if not os.access(place, os.R_OK | os.W_OK | os.X_OK):
        return f"this user cannot write to {place}; change its permissions, or name another folder"
    try:
        is_in_use = Home(home).is_in_use()
    except OSError as error:
        return f"{error}; change its permissions"
    if is_in_use:
        return f"{home} is in use by another process of this client, which already takes part"
    return None


def _check_connection(address: str, invited: Invitation, clock: WallClock) -> Iterator[Finding]:
    """Connect in the same way as the client, and ask if the invitation is still unused."""
    try:
        asyncio.run(asyncio.wait_for(look(address, invited), _TIMEOUT_S))
    except TimeoutError:
        words = f"{address} did not answer within {_TIMEOUT_S:g} s; {_suggest_checks(address)}"
        yield Finding("connection", CheckOutcome.BAD, words)
    except ConnectionError as error:
        yield explain(address, str(error), now=utc(clock.unix_s()))
    except (ConnectionRefused, ProtocolError, DeploymentError) as error:
        yield Finding("invitation", CheckOutcome.BAD, str(error))
    else:
        yield Finding(
            "connection", CheckOutcome.OK, f"{address} answers, and the invitation is open"
        )
        if invited.ca_pem:
            yield Finding(
                "TLS", CheckOutcome.OK, "its certificate was issued by the invitation's authority"
            )
            now = utc(clock.unix_s())
            yield Finding("clock", CheckOutcome.OK, f"{now}, within the certificate's validity")


def explain(address: str, error: str, *, now: str) -> Finding:
    """Translate a gRPC connection error into a finding with its cause and remedy.

    Args:
        address: The address that gRPC tried, ``host:port``.
        error: gRPC's error message.
        now: The time by this device's clock, as text.
    """
    # First: such an error also says CERTIFICATE_VERIFY_FAILED, which alone means another
    # authority.
    if found := _CLOCK_WRONG.search(error):
        words = f"{address}: {found[0]} at {now} by this device's clock; set the clock"
        return Finding("clock", CheckOutcome.BAD, words)
    if "CERTIFICATE_VERIFY_FAILED" in error:
        words = (
            f"{address} presents a certificate of another authority: it is not the coordinator of "
            "this invitation, or a proxy intercepts TLS; exempt this address from interception"
        )
        return Finding("TLS", CheckOutcome.BAD, words)
    if found := _PROXY_REFUSES.search(error):
        words = (
            f"the HTTP proxy answers {found[1]} to the request for {address}; allow CONNECT "
            f"{address} in the proxy, and put the user and password, if any, into https_proxy"
        )
        return Finding("proxy", CheckOutcome.BAD, words)
    if "handshake failed" in error:
        words = f"{error}; {address} is not a coordinator, or something in between ends TLS"
        return Finding("TLS", CheckOutcome.BAD, words)
    return Finding("connection", CheckOutcome.BAD, f"{error}; {_suggest_checks(address)}")


def _suggest_checks(address: str) -> str:
    if any(os.environ.get(name) for name in _PROXY_VARIABLES):
        way = "through the proxy that https_proxy names, unless no_proxy excludes it"
    else:
        way = "directly; if this site has an HTTP proxy, set https_proxy"
    return (
        f"check that the coordinator is running and that the firewall allows TCP to {address}; "
        f"this device connects {way}"
    )


def _check_session(
    enrolment: Enrolment, addresses: tuple[str, ...], clock: WallClock
) -> Iterator[Finding]:
    for address in addresses:
        begin_unix_s = clock.unix_s()
        try:
            welcome = asyncio.run(_open_session(enrolment, address))
        except ConnectionError as error:
            yield explain(address, str(error), now=utc(clock.unix_s()))
        except (ConnectionRefused, ProtocolError, DeploymentError) as error:
            yield Finding("session", CheckOutcome.BAD, str(error))
        else:
            yield Finding("session", CheckOutcome.OK, f"welcome to {_describe_runs(welcome)}")
            yield _check_offset(welcome.unix_s, begin_unix_s, clock.unix_s())


def _check_offset(their_unix_s: float, begin_unix_s: float, end_unix_s: float) -> Finding:
    """Compare the coordinator's clock with this one, read before and after the request.

    Only certificates and the user's conditions depend on it: deadlines are sent as seconds left.
    """
    # They read their clock between `begin` and `end`: only a time outside of that shows an offset.
    ahead_s = max(0.0, begin_unix_s - their_unix_s) - max(0.0, their_unix_s - end_unix_s)
    outcome, words = CheckOutcome.OK, f"within {_MAX_OFFSET_S:.0f} s of the coordinator's clock"
    if abs(ahead_s) > _MAX_OFFSET_S:
        side = "ahead of" if ahead_s > 0 else "behind"
        outcome, words = (
            CheckOutcome.WARNING,
            (
                f"this device's clock is {abs(ahead_s):.0f} s {side} the coordinator's; set it, "
                "because certificates start and expire by this clock"
            ),
        )
    return Finding("clock offset", outcome, words)


def _describe_runs(welcome: wire_pb2.Welcome) -> str:
    run_ids = welcome.run_ids or (welcome.run_id,)
    return f"run{'s' if len(run_ids) > 1 else ''} {', '.join(run_ids)}"


async def _open_session(enrolment: Enrolment, address: str) -> wire_pb2.Welcome:
    hello = wire_pb2.Hello(software=SOFTWARE, only_looks=True)
    async with session_at(address, enrolment, hello) as live:
        return live.session.welcome


def _check_data(name: str) -> Finding:
    try:
        with convert_trainer_errors():
            trainer = make_trainer(name)
            if (try_out := getattr(trainer, "try_out", None)) is not None:
                try_out()  # runs some of its examples through its model
    except FedlearnError as error:
        return Finding("data", CheckOutcome.BAD, str(error))
    num_examples = getattr(trainer, "num_examples", None)
    if num_examples is None:
        return Finding("data", CheckOutcome.OK, f"{name} was created")
    outcome = CheckOutcome.OK if num_examples > 0 else CheckOutcome.BAD
    return Finding("data", outcome, f"{name} has {num_examples} examples")
