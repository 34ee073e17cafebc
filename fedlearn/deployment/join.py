"""A client in the foreground: ``fedlearn join``."""

import asyncio
import os
import signal
import sys
from collections.abc import Sequence
from itertools import chain
from pathlib import Path
from typing import TextIO

from fedlearn.client.diagnosis import Finding, Verdict, diagnose
from fedlearn.client.events import AgentEvent, EventKind
from fedlearn.client.home import Home
from fedlearn.client.options import RuntimeOptions
from fedlearn.client.runtime import Runtime, make_runtime
from fedlearn.client.signals import signals_call
from fedlearn.config import load_client
from fedlearn.deployment.known_keys import default_home
from fedlearn.errors import ConfigError, DeploymentError
from fedlearn.identity.identity import Invitation
from fedlearn.session.faults import in_users_code
from fedlearn.transport.addresses import require_addresses

#: What the process ends with when the user's training does not listen.
_STUCK = 3


def join(
    invitation: Path,
    *,
    task: str,
    home: Path | None,
    config: Path | None,
    require_secure_aggregation: bool,
    roster: Path | None = None,
    num_workers: int | None = None,
    addresses: Sequence[str] = (),
    out: TextIO = sys.stdout,
) -> None:
    """Take part until SIGTERM or Ctrl-C; enrols first if that is not done.

    SIGCONT has it look for its coordinator at once; Windows has no such signal.

    The arguments are those of the command ``fedlearn join``. Without a ``home`` it is that of
    :func:`default_home`, without ``num_workers`` they are those of ``config``; ``out`` is told what
    happens, a line for each step.

    Raises:
        ConfigError: There is something wrong with ``config``.
        DeploymentError: The invitation, the trainer, the folder or an address is of no use.
        EnrolmentRefused: The coordinator does not take the invitation.
    """
    given = load_client(config)
    folder = home or _home(invitation)
    Home(folder).set_consent(granted=True)  # the command is the consent
    _find_modules_here()
    options = RuntimeOptions(
        home=folder,
        trainer=task,
        invitation=invitation,
        conditions=given.to_conditions(),
        policy=given.to_policy(require_secure_aggregation=require_secure_aggregation),
        num_workers=num_workers or given.training.num_workers,
        reconnection=given.to_reconnection(),
        roster=roster,
        addresses=require_addresses(addresses),
    )

    def tell(event: AgentEvent) -> None:
        if event.kind is not EventKind.PROGRESS:  # that is not worth a line
            print(_line(event), file=out, flush=True)

    with in_users_code():
        runtime = make_runtime(options, on_event=tell)
    if not asyncio.run(_run(runtime)):
        os._exit(_STUCK)  # a training thread that does not end would keep the process


def check_before(
    invitation: Path,
    *,
    task: str | None,
    home: Path | None,
    config: Path | None,
    addresses: Sequence[str] = (),
    out: TextIO = sys.stdout,
) -> None:
    """Look whether this machine could take part, a line for each thing; joins nothing.

    Raises:
        DeploymentError: Something is in the way; the lines say what.
    """
    folder = home or _home(invitation)
    _find_modules_here()
    problems = []
    own = [] if config is None else [_config_finding(config)]
    known = require_addresses(addresses)
    findings = diagnose(invitation, home=folder, trainer=task, addresses=known)
    for finding in chain(own, findings):
        print(f"{finding.verdict:<4} {finding.name}: {finding.message}", file=out, flush=True)
        problems += [] if finding.is_fine else [finding.name]
    if problems:
        raise DeploymentError(
            f"this device cannot take part yet: {', '.join(problems)}; see the lines above"
        )


def _find_modules_here() -> None:
    """Let a module in the working directory be found, as a script finds its neighbours."""
    sys.path.insert(0, str(Path.cwd()))


def _config_finding(config: Path) -> Finding:
    try:
        policy = load_client(config).to_policy()
    except ConfigError as error:
        return Finding("config", Verdict.BAD, str(error))
    if warning := policy.secure_aggregation.warning:
        return Finding("config", Verdict.WARNING, f"{config}: {warning}")
    return Finding("config", Verdict.OK, f"{config} can be used")


def _home(invitation: Path) -> Path:
    return default_home(Invitation.load(invitation).name, environ=os.environ)


async def _run(runtime: Runtime) -> bool:
    callbacks = {signal.SIGTERM: runtime.stop, signal.SIGINT: runtime.stop}
    if sys.platform != "win32":
        # Of all signals the one that does no harm before this line, and comes by itself after a
        # stop.
        callbacks[signal.SIGCONT] = runtime.wake
    with signals_call(callbacks):
        return await runtime.run()


def _line(event: AgentEvent) -> str:
    place = "" if event.round_num is None else f"round {event.round_num + 1}: "
    words = f": {event.message}" if event.message else ""
    return f"{place}{event.kind}{words}"
