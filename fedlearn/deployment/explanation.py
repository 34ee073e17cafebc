"""Explains what a deployed run is doing and what it waits for, from its stored status."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, TypeAlias

from fedlearn.core.kinds import DISTILLATION
from fedlearn.core.messages import EvaluateRequest
from fedlearn.core.quantities import format_number
from fedlearn.core.words import replace_unprintable
from fedlearn.deployment.live_status import Phase
from fedlearn.rounds.journal import Control, DeployedRun
from fedlearn.rounds.records import RunRecord, RunStatus

#: A coordinator's status, as stored in the database.
_Status: TypeAlias = Mapping[str, Any]  # Any: JSON


@dataclass(frozen=True, kw_only=True)
class Explanation:
    """The state of a deployed run, and whether a coordinator is alive, for ``fedlearn why``."""

    deployment: DeployedRun
    is_alive: bool
    run: RunRecord
    names: Mapping[int, str]
    start: str

    @property
    def is_at_work(self) -> bool:
        """Whether a coordinator runs the run, which is not done."""
        return self.is_alive and self.run.status is not RunStatus.DONE

    def describe(self) -> list[str]:
        """Describe the run in the first lines, then each client that was asked, one per line."""
        lines = self.describe_run()
        if not self.is_at_work:
            return lines
        lines += [
            f"  {each['name']}: {replace_unprintable(each['reason'])}" for each in self.refused
        ]
        lines += [
            f"  {name}: {replace_unprintable(reason) or 'its version runs no bundles'}"
            for name, reason in self.without_bundle.items()
        ]
        for how in self.clients:
            name = how["name"] or f"client {how['client_id']}"
            lines.append(f"  {name}: {CLIENT_PHASES[how['phase']]}, for {how['since_s']:.0f} s")
        return lines + [self._describe_failing(how) for how in self.failing]

    def describe_run(self) -> list[str]:
        """Describe what the run does and what it waits for, without single clients."""
        found, status = self.deployment, self.deployment.status
        if self.run.status is RunStatus.DONE:
            return [f"{found.name} is done: {_describe_round(status)}"]
        if not self.is_alive:
            failed = f"; it failed: {self.run.error}" if self.run.status is RunStatus.FAILED else ""
            said = "none has reported a status"
            if status:
                said = f"its last status: {_describe_round(status)}, {_describe_phase(status)}"
            start = f"start one: `{self.start}`"
            return [f"{found.name} has no coordinator{failed}", said, start]
        heading = f"{found.name}: {_describe_round(status)}, {_describe_phase(status)}"
        return [heading, *_describe_wait(status, control=found.control)]

    def values(self) -> dict[str, object]:
        """Return the explanation as JSON values."""
        return {
            "run": self.deployment.name,
            "run_status": self.run.status.value,
            "error": self.run.error,
            "alive": self.is_alive,
            "control": self.deployment.control,
            "holder": self.deployment.holder,
            "status": dict(self.deployment.status),
            "clients": self.clients,
            "failing": self.failing,
            "without_bundle": self.without_bundle,
        }

    @property
    def refused(self) -> list[_Status]:
        """The clients that are refused because of their version: name and reason."""
        status: _Status = self.deployment.status
        return list(status.get("other_version", ()))

    @property
    def without_bundle(self) -> Mapping[str, str]:
        """The connected clients that do not run the run's bundle, with the reason."""
        status: _Status = self.deployment.status
        return dict(status.get("without_bundle", {}))

    @staticmethod
    def _describe_failing(how: _Status) -> str:
        name = how["name"] or f"client {how['client_id']}"
        aside = "; it is set aside until it reconnects" if how["is_set_aside"] else ""
        reason = replace_unprintable(how["reason"]) or "no reason given"
        return f"  {name}: has failed {how['in_a_row']} times in a row ({reason}){aside}"

    @property
    def failing(self) -> list[_Status]:
        """The clients that keep failing: how often in a row, why, and whether set aside."""
        status: _Status = self.deployment.status
        set_aside = set(status.get("clients_set_aside", ()))
        return [
            {
                "client_id": int(number),
                "name": self.names.get(int(number)),
                "is_set_aside": int(number) in set_aside,
                **how,
            }
            for number, how in status.get("failing", {}).items()
        ]

    @property
    def clients(self) -> list[_Status]:
        """The clients that the current round asked: phase, and seconds since it began."""
        status: _Status = self.deployment.status
        return [
            {"client_id": int(number), "name": self.names.get(int(number)), **how}
            for number, how in status.get("clients", {}).items()
        ]


#: Descriptions of the phases of a client that was asked.
CLIENT_PHASES = {
    "asked": "asked, but it is not connected",
    "connected": "has been sent the task",
    "downloading": "downloads the model",
    "training": "trains",
    "uploading": "uploads its update",
    "reported": "has reported",
    "failed": "has failed",
    "gone": "has lost its connection; it may come back",
}


def _get_exchange(status: _Status) -> _Status:
    return status.get("exchange") or {}


def _describe_round(status: _Status) -> str:
    if not status:
        return "no round yet"
    finished, total = status["round"], status["rounds"]
    retried = f" (attempt {status['attempt'] + 1})" if status.get("attempt") else ""
    return f"{finished} of {total} rounds finished{retried}"


def _describe_phase(status: _Status) -> str:
    words = {
        Phase.STARTING: "it is starting",
        Phase.STANDBY: "it waits for another coordinator to end",
        Phase.WAITING: "it waits for clients",
        Phase.ROUND: "a round is under way",
        Phase.COMMITTING: "the round is being committed",
        Phase.PAUSED: "it is paused",
        Phase.STOPPING: "it is stopping",
        Phase.DONE: "it is done",
    }
    if _get_exchange(status).get("kind") == EvaluateRequest.kind:
        return "clients evaluate the model"
    return words[Phase(status["phase"])]


def _describe_wait(status: _Status, *, control: Control) -> list[str]:
    phase, lines = Phase(status["phase"]), list[str]()
    for kind, progress in status.get("training", {}).items():
        if progress["step_num"] < progress["num_steps"]:
            of = "the clients' models together" if kind == DISTILLATION else "its own examples"
            lines.append(
                f"it trains on {of}: step {progress['step_num']} of {progress['num_steps']}, "
                f"loss {format_number(progress['loss'])}, "
                f"{progress['examples_per_s']:.0f} examples/s"
            )
    num_set_aside, num_elsewhere = status.get("set_aside", 0), status.get("elsewhere", 0)
    num_refused = len(status.get("other_version", ()))
    if phase is Phase.WAITING:
        lines.append(
            f"it needs {status['needed']} eligible clients: {status.get('connected', 0)} "
            f"are connected, {status.get('eligible', 0)} of them eligible"
            + (f" ({num_elsewhere} work for another run)" if num_elsewhere else "")
            + (f", {num_set_aside} set aside" if num_set_aside else "")
            + (f", {num_refused} refused because of their version" if num_refused else "")
        )
    if phase is Phase.PAUSED:
        lines.append("`fedlearn resume` continues it")
    elif control == "pause":
        lines.append("it pauses when this round is finished")
    if phase is Phase.ROUND:
        closes = f"it closes after {status['wanted']} reports and needs {status['min_reports']}"
        if (remaining_s := _get_exchange(status).get("remaining_s")) is not None:
            closes += f", its deadline is in {max(0, math.ceil(remaining_s))} s"
        lines.append(closes)
        if (most := status.get("in_flight_limit")) is not None:
            lines.append(f"up to {most} clients are in flight; fewer while replies wait here")
    return lines
