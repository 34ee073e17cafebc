"""The process that an :class:`~fedlearn.client.agent.Agent` starts.

It reads its options from standard input and talks to the application over one socket, a JSON
object a line: events go out, facts about the device come in. When the socket closes, the
application is gone, and so is this process. SIGTERM ends it at the next batch.
"""

import asyncio
import json
import os
import signal
import socket
import sys
from dataclasses import asdict

import structlog

from fedlearn.client.conditions import Facts
from fedlearn.client.events import AgentEvent, EventKind
from fedlearn.client.home import Home
from fedlearn.client.options import RuntimeOptions
from fedlearn.client.process import Exit
from fedlearn.client.runtime import Runtime, make_runtime
from fedlearn.errors import DeploymentError, EnrolmentRefused

#: Seconds that the process of an application that has died may take to end.
_PREDECESSOR_S = 15.0


class _Application:
    """The other end of the socket."""

    def __init__(self, link: socket.socket) -> None:
        self._link = link
        self._writer: asyncio.StreamWriter | None = None

    def tell(self, event: AgentEvent) -> None:
        """Send one event; an application that has gone does not hear it."""
        line = json.dumps(asdict(event)).encode() + b"\n"
        if self._writer is not None:
            self._writer.write(line)
            return
        try:
            self._link.sendall(line)
        except OSError:
            return

    async def listen(self, runtime: Runtime) -> None:
        """Hear what the application knows until it is gone."""
        reader, self._writer = await asyncio.open_connection(sock=self._link)
        try:
            while line := await reader.readline():
                runtime.tell(Facts(**json.loads(line)))
        except ConnectionError:
            pass  # it was killed
        runtime.stop()


async def _run(runtime: Runtime, application: _Application) -> bool:
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, runtime.stop)
    listening = asyncio.create_task(application.listen(runtime))
    try:
        return await runtime.run()
    finally:
        listening.cancel()
        await asyncio.gather(listening, return_exceptions=True)


def main() -> int:
    """Serve one application until it stops or goes away; the argument is the socket's number."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C in a terminal is for the application
    structlog.configure(
        wrapper_class=structlog.make_filtering_bound_logger("warning"),
        logger_factory=structlog.PrintLoggerFactory(sys.stderr),
    )
    application = _Application(socket.socket(fileno=int(sys.argv[1])))
    options = RuntimeOptions.from_json(sys.stdin.read())
    try:
        with Home(options.home).locked(timeout_s=_PREDECESSOR_S):
            pass  # the process of an application that has just died ends within a batch
        runtime = make_runtime(options, on_event=application.tell)
        is_over = asyncio.run(_run(runtime, application))
    except (DeploymentError, EnrolmentRefused) as error:
        application.tell(AgentEvent(kind=EventKind.FAILED, message=str(error)))
        return Exit.HOPELESS
    if not is_over:
        os._exit(Exit.STOPPED)  # a thread that does not end would keep the process
    return Exit.STOPPED


if __name__ == "__main__":
    sys.exit(main())
