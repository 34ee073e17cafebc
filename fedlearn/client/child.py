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
from types import TracebackType

import structlog

from fedlearn.client.conditions import Facts
from fedlearn.client.events import AgentEvent, EventKind
from fedlearn.client.forks import keep_from_forks
from fedlearn.client.home import Home
from fedlearn.client.live_session import cancel
from fedlearn.client.options import OPTIONS
from fedlearn.client.runtime import Runtime, make_runtime
from fedlearn.core.clock import SystemClock
from fedlearn.errors import DeploymentError, EnrolmentRefused, FedlearnError

#: Seconds that the process of an application that has died may take to end.
_PREDECESSOR_S = 15.0
#: Seconds that this process gets to end in order when its application has gone.
_END_S = 12.0


class _Application:
    """The other end of the socket."""

    def __init__(self, link: socket.socket) -> None:
        self._link = link
        self._writer: asyncio.StreamWriter | None = None
        # It must come to its end with this process, whatever the trainer starts or forks.
        link.set_inheritable(False)
        keep_from_forks(link)

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

    def tell_crash(
        self, kind: type[BaseException], error: BaseException, trace: TracebackType | None
    ) -> None:
        """Say what this process ends of, without the words: they may tell of the data."""
        self.tell(AgentEvent(kind=EventKind.CRASHED, message=kind.__name__))
        sys.__excepthook__(kind, error, trace)

    def watch(self) -> None:
        """End this process when the application goes, in order if there is one; on a thread."""

        def wait() -> None:
            poll = select.poll()
            poll.register(self._link, 0)  # that the other end is closed is always told
            poll.poll()
            if self._writer is not None:  # it is heard there, too
                SystemClock().sleep(_END_S)
            os._exit(0)

        threading.Thread(target=wait, name="fedlearn-watch", daemon=True).start()

    async def listen(self, runtime: Runtime) -> None:
        """Hear what the application knows until it is gone."""
        reader, self._writer = await asyncio.open_connection(sock=self._link)
        with suppress(ConnectionError):  # it was killed
            while line := await reader.readline():
                runtime.tell(Facts(**json.loads(line)))
        runtime.stop()


def _be_worker() -> None:
    """Be a worker of the trainer's, which SIGTERM ends: the loop's handler would not."""
    signal.set_wakeup_fd(-1)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)


async def _run(runtime: Runtime, application: _Application) -> bool:
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, runtime.stop)
    listening = asyncio.create_task(application.listen(runtime))
    try:
        return await runtime.run()
    finally:
        await cancel([listening])


def main() -> None:
    """Serve one application until it stops or goes away; the argument is the socket's number."""
    structlog.configure(
        wrapper_class=structlog.make_filtering_bound_logger("warning"),
        logger_factory=structlog.PrintLoggerFactory(sys.stderr),
    )
    application = _Application(socket.socket(fileno=int(sys.argv[1])))
    application.watch()
    os.register_at_fork(after_in_child=_be_worker)
    sys.excepthook = application.tell_crash
    options = OPTIONS.validate_json(sys.stdin.buffer.read())
    try:
        with Home(options.home).locked(timeout_s=_PREDECESSOR_S):
            pass  # the process of an application that has just died ends within a batch
        runtime = make_runtime(options, on_event=application.tell)
    except FedlearnError as error:  # the trainer's, perhaps: there is no data
        application.tell_end(error)
        return
    try:
        is_over = asyncio.run(_run(runtime, application))
    except (DeploymentError, EnrolmentRefused) as error:
        application.tell_end(error)
        return
    if not is_over:
        os._exit(0)  # a thread that does not end would keep the process


if __name__ == "__main__":
    main()
