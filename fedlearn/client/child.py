"""The training process, started by an :class:`~fedlearn.client.agent.Agent` or ``fedlearn join``.

It reads its options from standard input and talks to the application over one socket, one JSON
object per line: it sends events, and receives facts about the device and commands. A closed socket
means that the application is gone, so this process exits. SIGTERM ends it at the next batch.
"""

import asyncio
import gc
import json
import os
import signal
import socket
import sys
import threading
from contextlib import nullcontext, suppress
from dataclasses import asdict
from queue import SimpleQueue
from typing import TYPE_CHECKING, Any, NoReturn, TypeAlias

import structlog

from fedlearn.client.conditions import Facts
from fedlearn.client.events import AgentEvent, EventKind
from fedlearn.client.folder import ClientFolder
from fedlearn.client.loading import find_modules_here
from fedlearn.client.options import CHANGES, OPTIONS, RuntimeOptions
from fedlearn.client.patience import report_while_running
from fedlearn.client.process import STUCK
from fedlearn.client.signals import call_on_signals
from fedlearn.core.clock import SystemClock
from fedlearn.core.logs import configure_logs
from fedlearn.core.own_lines import find_own_line
from fedlearn.core.tracing import tracing
from fedlearn.errors import ConfigError, DeploymentError, EnrolmentRefused, FedlearnError
from fedlearn.processes.family import END_S, end_family
from fedlearn.processes.forks import keep_from_forks
from fedlearn.processes.links import take_link
from fedlearn.session.faults import convert_trainer_errors

if TYPE_CHECKING:  # imports torch, so `_serve` imports it once the watch thread runs
    from fedlearn.client.runtime import Runtime

#: Seconds to wait for the training process of an application that has just died to exit.
_PREDECESSOR_S = 15.0
#: Seconds that the application gets to read the last events.
_FLUSH_S = 5.0
_CHUNK_BYTES = 1 << 16

#: A message from the application, keyed by its type; Any because it is JSON.
_Command: TypeAlias = dict[str, Any]


class _Application:
    """The application at the other end of the socket; one thread sends to it, another receives.

    Until :meth:`attach`, this process exits at once if the application goes away or asks it to
    stop.
    """

    def __init__(self, link: socket.socket) -> None:
        self._link = link
        # The socket must close when this process dies, even if a fork of the trainer survives.
        keep_from_forks(link)
        self._events = SimpleQueue[bytes]()
        self._lock = threading.Lock()
        self._attached: tuple[asyncio.AbstractEventLoop, Runtime] | None = None
        self._early: list[_Command] = []
        self._gone = threading.Event()
        self._sender = threading.Thread(
            target=self._run_sender, name="fedlearn-events", daemon=True
        )
        self._sender.start()
        threading.Thread(target=self._listen, name="fedlearn-watch", daemon=True).start()

    def send(self, event: AgentEvent) -> None:
        """Queue an event for the application; it is lost if the application has gone."""
        self._events.put(json.dumps(asdict(event)).encode() + b"\n")

    def report_end(self, error: FedlearnError) -> None:
        """Report a final error: a restarted process would fail in the same way."""
        self.send(AgentEvent(kind=EventKind.FAILED, message=str(error), is_final=True))

    def report_crash(self, error: BaseException) -> None:
        """Report the crash's type and location, but not its message, which may contain data."""
        words = f"{type(error).__name__} at {find_own_line(error)}"
        self.send(AgentEvent(kind=EventKind.CRASHED, message=words))
        sys.excepthook(type(error), error, error.__traceback__)

    def finish(self) -> None:
        """Flush the queued events, for a few seconds at most; send none afterwards."""
        self._events.put(b"")
        self._sender.join(_FLUSH_S)

    def has_gone(self) -> bool:
        """Check whether the application has closed its end of the socket."""
        return self._gone.is_set()

    def attach(self, runtime: "Runtime") -> None:
        """Pass the application's messages to ``runtime`` from now on; call it in the event loop."""
        loop = asyncio.get_running_loop()
        with self._lock:
            self._attached = loop, runtime
            early, self._early = self._early, []
        for words in early:
            _handle(words, runtime)
        if self._gone.is_set():
            runtime.stop()

    def _run_sender(self) -> None:
        with suppress(OSError):
            while event := self._events.get():
                self._link.sendall(event)

    def _listen(self) -> None:
        rest = b""
        with suppress(OSError):  # the application may be killed
            while data := self._link.recv(_CHUNK_BYTES):
                *lines, rest = (rest + data).split(b"\n")
                for line in lines:
                    self._receive(json.loads(line))
        with self._lock:
            self._gone.set()
            attached = self._attached
        if attached is not None:
            loop, runtime = attached
            with suppress(RuntimeError):  # the loop has just closed
                loop.call_soon_threadsafe(runtime.stop)
            # Time to end properly. A training step inside native code does not notice, and is
            # killed.
            SystemClock().sleep(END_S)
        end_family()

    def _receive(self, words: "_Command") -> None:
        with self._lock:
            attached = self._attached
            if attached is None:
                self._early.append(words)
        if attached is not None:
            loop, runtime = attached
            with suppress(RuntimeError):  # the loop has just closed
                loop.call_soon_threadsafe(_handle, words, runtime)
        # Before the runtime exists, there is nothing to save, and no loop to ask.
        elif "Stop" in words:
            end_family()


def _handle(words: "_Command", runtime: "Runtime") -> None:
    match words:
        case {"Facts": facts}:
            runtime.update_facts(Facts(**facts))
        case {"Changes": changes}:
            runtime.change(CHANGES.validate_python(changes))
        case {"Wake": _}:
            runtime.wake()
        case {"Stop": _}:
            runtime.stop()


def _restore_sigterm() -> None:
    """Restore the default SIGTERM in a fork of the trainer, which inherits the client's handler."""
    signal.set_wakeup_fd(-1)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)


async def _run(runtime: "Runtime", application: _Application) -> bool:
    application.attach(runtime)
    with call_on_signals({signal.SIGTERM: runtime.stop}):
        return await runtime.run()


def main() -> NoReturn:
    """Serve one application until it stops this process or goes away.

    The command-line argument identifies the socket. At the end this process exits at once, without
    waiting for threads or processes of the trainer. The application kills those that are left, or
    this process does if the application is gone.
    """
    application = _Application(take_link(sys.argv[1]))
    try:
        code = _serve(application)
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else int(end.code is not None)
    except BaseException as error:  # noqa: BLE001 - it is reported, and ends this process
        application.report_crash(error)
        code = 1
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError, ValueError):
            stream.flush()
    application.finish()
    if application.has_gone():
        end_family()
    os._exit(code)


def _serve(application: _Application) -> int:
    if sys.platform != "win32":
        os.register_at_fork(after_in_child=_restore_sigterm)
    options = OPTIONS.validate_json(sys.stdin.buffer.read())
    configure_client_logs(options)
    # Imports create a million objects that stay; to scan them again and again takes a sixth longer.
    gc.disable()
    from fedlearn.client.runtime import make_runtime  # noqa: PLC0415 (torch takes seconds)

    gc.enable()
    gc.freeze()

    if options.is_command:  # only now, so that no local file shadows a module imported above
        find_modules_here()

    try:
        with ClientFolder(options.home).lock(timeout_s=_PREDECESSOR_S):
            pass  # wait for the process of an application that has just died: it ends in a batch
        made = options.trainer or "the client"
        with (
            report_while_running(f"{made} is still being created", application.send),
            # In an application's log, leave out the error's message, which may quote the data.
            convert_trainer_errors() if options.is_command else nullcontext(),
        ):
            runtime = make_runtime(options, on_event=application.send)
    except FedlearnError as error:  # for example, the trainer has found no data
        application.report_end(error)
        return 0
    try:
        with tracing(options.traces, role="client", environ=os.environ):
            has_ended = asyncio.run(_run(runtime, application))
    except (ConfigError, DeploymentError, EnrolmentRefused) as error:
        application.report_end(error)
        return 0
    return 0 if has_ended else STUCK


def configure_client_logs(options: RuntimeOptions) -> None:
    """Log as the options say."""
    if options.is_command:
        configure_logs(level=options.log_level, quiet=False, log_format=options.log_format)
    else:  # these lines appear among those of the application
        structlog.configure(
            wrapper_class=structlog.make_filtering_bound_logger(options.log_level),
            logger_factory=structlog.PrintLoggerFactory(sys.stderr),
        )


if __name__ == "__main__":
    main()
