"""Check whether this machine could take part: ``fedlearn join --check``."""

import sys
from collections.abc import Sequence
from itertools import chain
from pathlib import Path
from typing import TextIO

from fedlearn.client.diagnosis import CheckOutcome, Finding, diagnose
from fedlearn.client.loading import find_modules_here
from fedlearn.config import load_client
from fedlearn.deployment.join import home_of
from fedlearn.errors import ConfigError, DeploymentError
from fedlearn.transport.addresses import require_addresses


def check_device(
    invitation: Path,
    *,
    task: str | None,
    home: Path | None,
    config: Path | None,
    addresses: Sequence[str] = (),
    out: TextIO = sys.stdout,
) -> None:
    """Check whether this machine could take part, and print one line per check; nothing is joined.

    Raises:
        DeploymentError: A check failed; the lines say which.
    """
    folder = home or home_of(invitation)
    find_modules_here()
    problems = []
    own = [] if config is None else [_check_config(config)]
    known = require_addresses(addresses)
    findings = diagnose(invitation, home=folder, trainer=task, addresses=known)
    for finding in chain(own, findings):
        print(f"{finding.outcome:<4} {finding.name}: {finding.message}", file=out, flush=True)
        problems += [] if finding.is_fine else [finding.name]
    if problems:
        raise DeploymentError(
            f"this device cannot take part yet: {', '.join(problems)}; see the lines above"
        )


def _check_config(config: Path) -> Finding:
    try:
        loaded = load_client(config)
        policy = loaded.to_policy()
        loaded.require_data()
    except ConfigError as error:
        return Finding("config", CheckOutcome.BAD, str(error))
    if warning := policy.secure_aggregation.warning:
        return Finding("config", CheckOutcome.WARNING, f"{config}: {warning}")
    return Finding("config", CheckOutcome.OK, f"{config} can be used")
