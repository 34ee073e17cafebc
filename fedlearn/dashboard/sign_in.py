"""Lets nobody see a page without sign-in, and only what the operator's roles permit.

Attacks, and what stops them: a session id that an attacker has planted (a sign-in makes a new id);
a sign-in that an attacker has begun (its state must come back in the browser that began it, once);
a stolen or forged token (:mod:`fedlearn.dashboard.provider`); a link that leads elsewhere after the
sign-in (only paths of this page); a sign-out from another site (its origin must be this page).
"""

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from hmac import compare_digest
from typing import Final
from urllib.parse import urlsplit

import anyio
import structlog
from starlette.requests import Request
from starlette.responses import PlainTextResponse, RedirectResponse, Response
from starlette.types import ASGIApp, Receive, Scope, Send

from fedlearn.config.dashboard import DashboardSection
from fedlearn.core.clock import RealClock
from fedlearn.dashboard.provider import Provider, SignInRefused, find_operator
from fedlearn.dashboard.remembered import Remembered
from fedlearn.dashboard.rendering import Dashboard
from fedlearn.dashboard.sessions import BegunSignIn, Kept, PageSession, new_secret
from fedlearn.dashboard.visits import VisitLog
from fedlearn.errors import NotPermitted, StoreError
from fedlearn.identity.operators import OperatorRecord
from fedlearn.identity.roles import (
    ALL_STUDIES,
    PERMISSIONS,
    Command,
    Reach,
    Studies,
    find_studies,
)
from fedlearn.store.operators import StoredOperators

_BEGIN, _END, _OUT = "/sign-in", "/sign-in/callback", "/sign-out"
_BEGUN_S, _MOST_BEGUN, _MOST_SESSIONS = 600.0, 1000, 10_000
#: A revoked role is still believed for so long.
_OPERATORS_S: Final = 5.0
_LOCAL_PATH = re.compile(r"/(?![/\\])[!-~]*")
#: The command that shows the same as the pages under the first part of a path.
_COMMANDS: Final[Mapping[str, Command]] = {
    "": Command.RUNS,
    "events": Command.RUNS,
    "runs": Command.SHOW,
    "compare": Command.SHOW,
    "queue": Command.QUEUE,
    "studies": Command.SHOW_STUDY,
    "clients": Command.CLIENTS,
    "releases": Command.MODELS,
    "budgets": Command.SHOW,
    "alerts": Command.WHY,
    "audit": Command.AUDIT_LOG,
}

_log = structlog.get_logger(__name__)


@dataclass(frozen=True)
class Cookies:
    """The cookies of the page, which no script reads and no other site sends with a change."""

    is_secure: bool

    def name(self, of: str) -> str:
        """Return the full name; the prefix keeps a neighbor's host from setting it."""
        return f"__Host-fedlearn-{of}" if self.is_secure else f"fedlearn-{of}"

    def read(self, request: Request, of: str) -> str:
        """Return the value that a request has; empty if it has none."""
        return request.cookies.get(self.name(of), "")

    def write(self, response: Response, of: str, value: str) -> None:
        """Set a cookie until the browser ends; empty removes it."""
        response.set_cookie(
            self.name(of),
            value,
            max_age=None if value else 0,
            path="/",
            secure=self.is_secure,
            httponly=True,
            samesite="lax",  # strict would leave it out on the way back from the provider
        )


class SignInGate:
    """ASGI middleware in front of all pages."""

    def __init__(
        self,
        app: ASGIApp,
        *,
        dashboard: Dashboard,
        section: DashboardSection,
        visits: VisitLog,
    ) -> None:
        self._app, self._dashboard, self._section = app, dashboard, section
        self._visits = visits
        clock: RealClock = dashboard.clock
        self._provider = Provider(section, clock)
        self._public_url = (section.public_url or "").rstrip("/")
        self._cookies = Cookies(urlsplit(self._public_url).scheme == "https")
        self._sessions: Kept[PageSession] = Kept(
            clock=clock, for_s=3600 * section.session_h, most=_MOST_SESSIONS
        )
        self._begun: Kept[BegunSignIn] = Kept(clock=clock, for_s=_BEGUN_S, most=_MOST_BEGUN)
        operators = StoredOperators(dashboard.database, clock)
        self._operators = Remembered(
            lambda: {each.name: each for each in operators.list()},
            clock=clock,
            for_s=_OPERATORS_S,
        )

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer a request for the sign-in, or for a page that the user may see."""
        if scope["type"] != "http" or scope["path"].startswith("/static/"):
            await self._app(scope, receive, send)
            return
        request = Request(scope)
        steps: dict[str, Callable[[Request], Response | None]] = {
            _BEGIN: self._begin,
            _END: self._finish,
            _OUT: self._sign_out,
        }
        step = steps.get(scope["path"], self._find_objection)
        response: Response | None
        try:
            response = await anyio.to_thread.run_sync(step, request)
        except StoreError as error:  # whom the page serves, or that it does, cannot be known
            response = PlainTextResponse(f"{error}\n", 503)
        await (self._app if response is None else response)(scope, receive, send)

    # ---- Pages ----------------------------------------------------------------------------

    def _find_objection(self, request: Request) -> Response | None:
        """Return the answer to a request that is not permitted; ``None`` if it is."""
        id_ = self._cookies.read(request, "session")
        session = self._sessions.find(id_)
        if session is None:
            return self._ask_to_sign_in(request)
        command = _COMMANDS.get(request.url.path.split("/")[1], Command.RUNS)
        try:
            studies = self._find_studies(command, session)
        except NotPermitted as error:
            return self._dashboard.render_error(
                request, status_code=403, title="Not permitted", detail=str(error)
            )
        request.state.operator = session.operator
        request.state.record_reading = partial(
            self._visits.record_reading, request, session.operator
        )
        request.state.dashboard = self._dashboard.restrict_to(studies)
        # A page that stays open asks again whether it may: see `live_events`.
        request.state.may_stay = lambda: self._may_stay(id_, command, studies)
        return None

    def _may_stay(self, id_: str, command: Command, studies: Studies) -> bool:
        session = self._sessions.find(id_)
        try:
            return session is not None and self._find_studies(command, session) == studies
        except NotPermitted:
            return False

    def _find_studies(self, command: Command, session: PageSession) -> Studies:
        """Return the studies of which the pages of a command show something to a user.

        Raises:
            NotPermitted: There is none, or the pages show the whole deployment.
        """
        operator = self._find_operator(session.operator)
        permission, found = PERMISSIONS[command], find_studies(command, operator.grants)
        is_of_all = permission.reach is Reach.DEPLOYMENT
        if ALL_STUDIES in found.names or (found.names and not is_of_all):
            return found
        needed = " or ".join(sorted(permission.roles))
        where = f"all studies ({ALL_STUDIES})" if is_of_all else "a study"
        raise NotPermitted(
            f"this page takes the role {needed} in {where}; ask an admin for it "
            "(`fedlearn operator grant`)"
        )

    def _find_operator(self, name: str) -> OperatorRecord:
        operator = self._operators().get(name)
        if operator is None or operator.status == "revoked":
            raise NotPermitted(f"there is no operator {name}, or it was revoked")
        return operator

    def _ask_to_sign_in(self, request: Request) -> Response:
        query = f"?{request.url.query}" if request.url.query else ""
        return self._dashboard.render_sign_in(request, next_path=f"{request.url.path}{query}")

    # ---- Signing in and out ---------------------------------------------------------------

    def _begin(self, request: Request) -> Response:
        wanted = request.query_params.get("next", "/")
        begun = BegunSignIn(
            state=new_secret(),
            nonce=new_secret(),
            verifier=new_secret(),
            next_path=wanted if _LOCAL_PATH.fullmatch(wanted) else "/",
        )
        try:
            response = RedirectResponse(self._provider.build_url(begun), 303)
        except SignInRefused as error:
            return self._refuse(request, str(error), status_code=502)
        self._cookies.write(response, "sign-in", self._begun.add(begun))
        return response

    def _finish(self, request: Request) -> Response:
        begun = self._begun.take(self._cookies.read(request, "sign-in"))
        given = request.query_params
        if begun is None or not compare_digest(begun.state, given.get("state", "")):
            return self._refuse(request, "this browser has begun no such sign-in; begin again")
        if given.get("iss") not in (None, self._section.issuer) or not given.get("code"):
            return self._refuse(request, "the provider has ended the sign-in; try again")
        try:
            claims = self._provider.read_claims(given["code"], begun)
        except SignInRefused as error:
            return self._refuse(request, str(error))
        identity = str(claims.get("email") or f"sub:{claims['sub']}")
        operator = find_operator(claims, self._section.people)
        if operator is None:
            text = f"{identity} is nobody here; an admin can add it to dashboard.people"
            return self._refuse(request, text, identity=identity)
        try:
            self._find_operator(operator)
        except NotPermitted as error:
            return self._refuse(request, str(error), identity=identity)
        self._visits.record_sign_in(request, operator, identity=identity)
        self._sessions.take(self._cookies.read(request, "session"))
        response = RedirectResponse(begun.next_path, 303)
        session = PageSession(operator=operator, identity=identity)
        self._cookies.write(response, "session", self._sessions.add(session))
        self._cookies.write(response, "sign-in", "")
        _log.info("signed_in", operator=operator, identity=identity, origin=_origin(request))
        return response

    def _sign_out(self, request: Request) -> Response:
        if request.method != "POST" or not self._is_from_here(request):
            return PlainTextResponse("A sign-out comes from the button of this page only.\n", 403)
        session = self._sessions.take(self._cookies.read(request, "session"))
        response = RedirectResponse("/", 303)
        self._cookies.write(response, "session", "")
        if session is not None:
            try:
                self._visits.record_sign_out(request, session.operator)
            except StoreError as error:  # the session is over all the same
                _log.warning("sign_out_not_recorded", reason=str(error))
        return response

    def _is_from_here(self, request: Request) -> bool:
        """Whether a page of ours has sent a request; no page can set either header."""
        site = request.headers.get("sec-fetch-site")
        if site is not None:
            return site == "same-origin"
        return request.headers.get("origin") == self._public_url  # browsers before 2023

    def _refuse(
        self, request: Request, detail: str, *, identity: str = "", status_code: int = 403
    ) -> Response:
        _log.warning("sign_in_refused", reason=detail, origin=_origin(request))
        self._visits.record_refusal(request, identity=identity, reason=detail)
        return self._dashboard.render_error(
            request, status_code=status_code, title="Not signed in", detail=detail
        )


def _origin(request: Request) -> str:
    return request.client.host if request.client else ""
