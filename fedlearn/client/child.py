"""The process that an :class:`~fedlearn.client.agent.Agent` starts.

It reads its options from standard input and talks to the application over one socket, a JSON
object a line: events go out, facts about the device come in. When the socket closes, the
application is gone, and so is this process. SIGTERM ends it at the next batch.
"""

import asyncio
import json
import os
import select
import signal
import socket
import sys
import threading
from contextlib import suppress
from dataclasses import asdict
from typing import TYPE_CHECKING, NoReturn

import structlog

from fedlearn.client.conditions import Facts
from fedlearn.client.descendants import MARK, end_marked
from fedlearn.client.events import AgentEvent, EventKind
from fedlearn.client.folder import ClientFolder
from fedlearn.client.forks import keep_from_forks
from fedlearn.client.options import CHANGES, OPTIONS
from fedlearn.client.places import place_of, told_while_it_lasts
from fedlearn.core.clock import SystemClock
from fedlearn.errors import DeploymentError, EnrolmentRefused, FedlearnError

if TYPE_CHECKING:  # imported once it is watched whether the application is still there
    from fedlearn.client.runtime import Runtime

#: Seconds that the process of an application that has died may take to end.
_PREDECESSOR_S = 15.0
#: Seconds that this process gets to end in order when its application has gone.
_END_S = 12.0


class _Application:
    """The other end of the socket."""

    def __init__(self, link: socket.socket) -> None:
        self._link = link
        # Told of the other end's closing also when the event loop has closed its own.
        self._watched = link.dup()
        self._writer: asyncio.StreamWriter | None = None
        # It must come to its end with this process, whatever the trainer starts or forks.
        link.set_inheritable(False)
        for each in (link, self._watched):
            keep_from_forks(each)

    def tell(self, event: AgentEvent) -> None:
        """Send one event; an application that has gone does not hear it."""
        line = json.dumps(asdict(event)).encode() + b"\n"
        if self._writer is not None:
            self._writer.write(line)
            return
        with suppress(OSError):
            self._link.sendall(line)

    def tell_end(self, error: FedlearnError) -> None:
        """Say why this process ends: it would end so again."""
        self.tell(AgentEvent(kind=EventKind.FAILED, message=str(error), is_final=True))

    def tell_crash(self, error: BaseException) -> None:
        """Say what this process ends of and where, without the words: they may tell of the data."""
        words = f"{type(error).__name__} at {place_of(error.__traceback__)}"
        self.tell(AgentEvent(kind=EventKind.CRASHED, message=words))
        sys.excepthook(type(error), error, error.__traceback__)

    def has_gone(self) -> bool:
        """Return whether nobody is at the other end any more."""
        poll = select.poll()
        poll.register(self._watched, 0)
        return bool(poll.poll(0))

    def watch(self) -> None:
        """End this process when the application goes, in order if there is one; on a thread."""

        def wait() -> None:
            poll = select.poll()
            poll.register(self._watched, 0)  # that the other end is closed is always told
            poll.poll()
            if self._writer is not None:  # it is heard there, too
                SystemClock().sleep(_END_S)
            _end_group()

        threading.Thread(target=wait, name="fedlearn-watch", daemon=True).start()

    async def listen(self, runtime: "Runtime") -> None:
        """Hear what the application knows until it is gone."""
        reader, self._writer = await asyncio.open_connection(sock=self._link)
        with suppress(ConnectionError):  # it was killed
            while line := await reader.readline():
                match json.loads(line):
                    case {"Facts": facts}:
                        runtime.tell(Facts(**facts))
                    case {"Changes": changes}:
                        runtime.change(CHANGES.validate_python(changes))
                    case {"Wake": _}:
                        runtime.wake()
        runtime.stop()


def _be_worker() -> None:
    """Be a worker of the trainer's, which SIGTERM ends: the loop's handler would not."""
    signal.set_wakeup_fd(-1)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)


async def _run(runtime: "Runtime", application: _Application) -> None:
    from fedlearn.client.live_session import cancel  # noqa: PLC0415 (gRPC)

    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, runtime.stop)
    listening = asyncio.create_task(application.listen(runtime))
    try:
        await runtime.run()
    finally:
        await cancel([listening])


def _end_group() -> NoReturn:
    """End this process and all that the trainer has started: nobody else will."""
    end_marked(os.environ.get(MARK, ""), but=[os.getpid()])
    os.killpg(os.getpgrp(), signal.SIGKILL)
    raise AssertionError("SIGKILL cannot be survived")


def main() -> NoReturn:
    """Serve one application until it stops or goes away; the argument is the socket's number.

    Then this process ends at once: what the trainer has left running is not waited for, and ended
    by whoever of the two is left.
    """
    application = _Application(socket.socket(fileno=int(sys.argv[1])))
    application.watch()
    code = 0
    try:
        _serve(application)
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else int(end.code is not None)
    except BaseException as error:  # noqa: BLE001 - it is told, and ends this process
        application.tell_crash(error)
        code = 1
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError, ValueError):
            stream.flush()
    if application.has_gone():
        _end_group()
    os._exit(code)


def _serve(application: _Application) -> None:
    structlog.configure(
        wrapper_class=structlog.make_filtering_bound_logger("warning"),
        logger_factory=structlog.PrintLoggerFactory(sys.stderr),
    )
    os.register_at_fork(after_in_child=_be_worker)
    options = OPTIONS.validate_json(sys.stdin.buffer.read())
    from fedlearn.client.runtime import make_runtime  # noqa: PLC0415 (torch takes seconds)

    try:
        with ClientFolder(options.home).locked(timeout_s=_PREDECESSOR_S):
            pass  # the process of an application that has just died ends within a batch
        with told_while_it_lasts(f"{options.trainer} is still being made", application.tell):
            runtime = make_runtime(options, on_event=application.tell)
    except FedlearnError as error:  # the trainer's, perhaps: there is no data
        application.tell_end(error)
        return
    try:
        asyncio.run(_run(runtime, application))
    except (DeploymentError, EnrolmentRefused) as error:
        application.tell_end(error)


if __name__ == "__main__":
    main()
