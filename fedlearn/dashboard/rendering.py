"""What all pages share: the open database, the templates, and the checked query of a request."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from enum import StrEnum
from threading import Lock
from typing import TypeVar
from urllib.parse import quote, urlencode

from jinja2 import Environment, PackageLoader
from markupsafe import Markup, escape
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import HTMLResponse

from fedlearn.config.service import ServiceSection
from fedlearn.core.clock import RealClock
from fedlearn.core.quantities import format_duration
from fedlearn.core.words import replace_unprintable
from fedlearn.dashboard.alerts import Alert, find_alerts, find_disk_alerts
from fedlearn.dashboard.log_check import check_log
from fedlearn.dashboard.pulse import Pulse
from fedlearn.dashboard.remembered import Remembered
from fedlearn.experiment.templates import make_environment
from fedlearn.identity.roles import ALL_STUDIES, EVERYTHING, Studies
from fedlearn.rounds.journal import DeployedRun
from fedlearn.rounds.scheduling import QueuedRun, restrict_queue
from fedlearn.store.contents import read_contents
from fedlearn.store.lease import list_deployments
from fedlearn.store.queue import RunQueue
from fedlearn.store.runs import Database

#: Seconds for which an answer is remembered that costs many queries.
_ALERTS_S, _CHECKED_S = 5.0, 60.0
EnumT = TypeVar("EnumT", bound=StrEnum)

#: Rows of a page of a list.
PAGE_SIZE = 50
_MAX_TEXT = 200
_UNITS_S = (
    ("year", 365.25 * 86400.0),
    ("month", 30.44 * 86400.0),
    ("day", 86400.0),
    ("hour", 3600.0),
    ("minute", 60.0),
)
_MOST_DIGITS = 18  # as the database's integers
#: Most runs in one picture: more colors cannot be told apart.
MAX_COMPARED = 7


@dataclass(eq=False)
class Dashboard:
    """The open dashboard, as ``request.app.state.dashboard``.

    Attributes:
        database: Where the runs are; it refuses writes, and has only what belongs to ``studies``.
        clock: For ages of runs.
        place: Describes where the runs are, without a password.
        studies: What its pages show.
        whole: The dashboard of everything; this one, if it shows everything.
        templates: The environment of its templates.
        alerts: Returns what needs attention.
        checked_log: Returns whether the audit log is as it was written.
        num_streams: Open pages that listen for events, all of them; see ``whole``.
    """

    database: Database
    clock: RealClock
    place: str
    studies: Studies = EVERYTHING
    whole: "Dashboard" = field(init=False)

    def __post_init__(self) -> None:
        """Create what the pages share."""
        self.whole = self
        self.templates = make_templates()
        self.alerts = Remembered(self._find_alerts, clock=self.clock, for_s=_ALERTS_S)
        self.checked_log = Remembered(
            lambda: check_log(self.database, self.clock), clock=self.clock, for_s=_CHECKED_S
        )
        self.num_streams = 0
        self._pulse = Pulse(self.clock)
        self._seen = dict[Studies, Dashboard]()
        self._lock = Lock()

    def restrict_to(self, studies: Studies) -> "Dashboard":
        """Return the dashboard that shows what belongs to ``studies``, and nothing else."""
        if ALL_STUDIES in studies.names:
            return self
        with self._lock:  # its alerts are remembered, so there is one for all its readers
            if studies not in self._seen:
                place = ", ".join(sorted(studies.names))
                database = self.database.restrict_to(studies)
                found = Dashboard(database, self.clock, place=place, studies=studies)
                found.whole, found._pulse = self, self._pulse
                self._seen[studies] = found
            return self._seen[studies]

    def read_queue(self) -> tuple[list[QueuedRun], Mapping[str, str]]:
        """Return the runs of the queue that it shows, and what each of them waits for."""
        queued = RunQueue(self.whole.database, self.clock).list()
        return restrict_queue(queued, covers=self.studies.covers)

    def _find_alerts(self) -> list[Alert]:
        alive = {each.name: self.is_alive(each) for each in list_deployments(self.database)}
        found = find_alerts(self.database, self.clock, is_alive=alive)
        if self.whole is self:
            found += find_disk_alerts(self.database.runs_dir)
        return sorted(found, key=lambda each: each.level != "failed")

    def is_alive(self, found: DeployedRun) -> bool:
        """Whether a coordinator is at work on a deployed run."""
        section = self.database.run(found.name).record.config.get("coordinator")
        ttl_s = section.get("lease_ttl_s") if isinstance(section, Mapping) else None
        default_s = ServiceSection().lease_ttl_s
        return self._pulse.is_alive(
            found, lease_ttl_s=ttl_s if isinstance(ttl_s, int | float) else default_s
        )

    def render(self, request: Request, template: str, **context: object) -> HTMLResponse:
        """Render a template with ``context``."""
        shown = {"has": read_contents(self.database), "num_alerts": len(self.alerts())}
        return self._render(request, template, 200, **shown, **context)

    def render_error(
        self, request: Request, *, status_code: int, title: str, detail: str
    ) -> HTMLResponse:
        """Render the page of an error, without the database, which may be the cause."""
        return self._render_alone(request, "error.html", status_code, title=title, detail=detail)

    def render_sign_in(self, request: Request, *, next_path: str) -> HTMLResponse:
        """Render the page that offers to sign in; ``next_path`` is where to go then."""
        return self._render_alone(request, "sign_in.html", 401, next_path=next_path)

    def _render_alone(
        self, request: Request, template: str, status_code: int, **context: object
    ) -> HTMLResponse:
        return self._render(request, template, status_code, has=None, num_alerts=0, **context)

    def _render(
        self, request: Request, template: str, status_code: int, **context: object
    ) -> HTMLResponse:
        shared = {
            "place": self.place,
            "now_unix_s": self.clock.unix_s(),
            "operator": getattr(request.state, "operator", None),
        }
        page = self.templates.get_template(template).render(shared | context)
        return HTMLResponse(page, status_code)


def dashboard_of(request: Request) -> Dashboard:
    """Return the dashboard that a request is for: with sign-in, what its user may see."""
    found: Dashboard = getattr(request.state, "dashboard", request.app.state.dashboard)
    return found


def record_reading(request: Request, release: str) -> None:
    """Record that a signed-in user is shown a release; without sign-in, nobody knows who it is.

    Raises:
        StoreError: It cannot be recorded, so the release must not be shown.
    """
    record = getattr(request.state, "record_reading", None)
    if record is not None:
        record(release=release)


def make_templates() -> Environment:
    """Return the environment of the dashboard's templates."""
    environment = make_environment(PackageLoader("fedlearn.dashboard"))
    environment.filters.update(
        duration=format_duration,
        age=format_age,
        instant=format_instant,
        count=_format_count,
        code=mark_code,
    )
    environment.globals.update(url_of=url_of)
    return environment


def url_of(*path: object, **query: object) -> str:
    """Build the URL of a page; parameters that are ``None`` or empty are left out.

    Example:
        >>> url_of("runs", "calm-otter", "clients", page=2, search="", **{"with": ["a", "b&c"]})
        '/runs/calm-otter/clients?page=2&with=a&with=b%26c'
    """
    values = [(key, value) for key, value in query.items() if value not in (None, "", [], ())]
    text = urlencode(values, doseq=True)
    return "/" + "/".join(quote(str(each), safe="") for each in path) + (f"?{text}" if text else "")


def format_age(instant_utc: str, now_unix_s: float) -> str:
    """Describe how long ago an instant in ISO 8601 was; empty if it is no instant.

    Example:
        >>> format_age("1970-01-02T00:00:00Z", 2.5 * 86400), format_age("soon", 0.0)
        ('36 hours ago', '')
    """
    try:
        seconds = now_unix_s - datetime.fromisoformat(instant_utc).timestamp()
    except ValueError:
        return ""
    size = abs(seconds)
    unit, unit_s = next((each for each in _UNITS_S if size >= 2 * each[1]), ("moment", 0.0))
    if not unit_s:
        return "just now" if seconds >= 0 else "in a moment"
    text = f"{size / unit_s:.0f} {unit}s"
    return f"{text} ago" if seconds > 0 else f"in {text}"


def format_instant(instant_utc: str) -> str:
    """Format an instant in ISO 8601 to the minute; text that is none is returned unchanged.

    Example:
        >>> format_instant("2026-01-02T03:04:05Z")
        '2026-01-02 03:04 UTC'
    """
    try:
        found = datetime.fromisoformat(instant_utc).astimezone(UTC)
    except ValueError:
        return instant_utc
    return f"{found:%Y-%m-%d %H:%M} UTC"


def mark_code(text: str) -> Markup:
    """Show what stands between backticks as code.

    Example:
        >>> mark_code("type `fedlearn why` <now>")
        Markup('type <code>fedlearn why</code> &lt;now&gt;')
    """
    parts = [escape(each) for each in replace_unprintable(text).split("`")]
    shown = (
        Markup("<code>{}</code>").format(each) if at % 2 else each for at, each in enumerate(parts)
    )
    return Markup("").join(shown)


def _format_count(number: int) -> str:
    return f"{number:,}"


class RequestQuery:
    """The parameters of a request's URL; what is unknown or invalid is refused with status 400."""

    def __init__(self, request: Request, *allowed: str) -> None:
        self._values = request.query_params
        if unknown := sorted(set(self._values) - set(allowed)):
            known = ", ".join(allowed) or "none"
            raise HTTPException(
                400, f"{unknown[0]}: there is no such parameter; there are: {known}"
            )

    def text(self, key: str) -> str:
        """Return a text; empty if there is none."""
        value = self._values.get(key, "").strip()
        if len(value) > _MAX_TEXT:
            raise HTTPException(400, f"{key}: it has more than {_MAX_TEXT} characters")
        return value

    def texts(self, key: str) -> list[str]:
        """Return the different values of a parameter that may be repeated, at most seven."""
        found = list(dict.fromkeys(each for each in self._values.getlist(key) if each))
        if len(found) > MAX_COMPARED:
            raise HTTPException(400, f"{key}: choose at most {MAX_COMPARED}")
        return found

    def choice(self, key: str, default: EnumT) -> EnumT:
        """Return a member of the enumeration of ``default``."""
        return self.optional(key, type(default)) or default

    def optional(self, key: str, kind: type[EnumT]) -> EnumT | None:
        """Return a member of ``kind``; ``None`` if there is none."""
        value = self.text(key)
        if not value:
            return None
        try:
            return kind(value)
        except ValueError:
            names = ", ".join(kind)
            raise HTTPException(400, f"{key}: {value!r} is none of {names}") from None

    def number(self, key: str, default: int, *, least: int = 1) -> int:
        """Return a whole number from ``least``."""
        return _parse(key, self.text(key) or str(default), least=least)

    def numbers(self, key: str, *, most: int) -> list[int]:
        """Return the numbers of a parameter that may be repeated, at most ``most`` of them."""
        found = self._values.getlist(key)
        if len(found) > most:
            raise HTTPException(400, f"{key}: give at most {most}")
        return [_parse(key, each, least=0) for each in found]


def _parse(key: str, value: str, *, least: int) -> int:
    is_number = value.isascii() and value.isdecimal() and len(value) <= _MOST_DIGITS
    if not is_number or int(value) < least:
        raise HTTPException(400, f"{key}: {value!r} is no whole number from {least}")
    return int(value)
