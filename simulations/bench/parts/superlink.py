"""Run rounds on a stock Flower SuperLink with stock SuperNodes, and time them."""

import json
import os
import socket
import subprocess
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from fedlearn.core.clock import SystemClock

_APP = Path(__file__).with_name("flower")
_START_TIMEOUT_S = 60.0
_RUN_TIMEOUT_S = 900.0


@dataclass(frozen=True)
class Flower:
    """A Flower installation, and a folder for a federation's files.

    Attributes:
        bin: Folder of its environment's programs.
        folder: Folder for logs, state and results.
    """

    bin: Path
    folder: Path

    @property
    def environ(self) -> Mapping[str, str]:
        """Environment of all its processes, in which Flower makes no network requests."""
        return os.environ | {
            "FLWR_HOME": str(self.folder / "home"),
            "FLWR_TELEMETRY_ENABLED": "0",
            "FLWR_DISABLE_UPDATE_CHECK": "1",
            "FLWR_DISABLE_RUNTIME_DEPENDENCY_INSTALLATION": "1",
            "PATH": f"{self.bin}{os.pathsep}{os.environ['PATH']}",
        }

    def seconds(self, *, nodes: int, rounds: int, size: int) -> list[float]:
        """Run rounds in which every node answers at once, and return the seconds of each.

        Raises:
            SystemExit: A process of Flower failed; its output is shown.
        """
        result = self.folder / "seconds.json"
        port = _free_port()
        home = self.folder / "home"
        home.mkdir()
        (home / "config.toml").write_text(
            f'[superlink.lab]\naddress = "127.0.0.1:{port}"\ninsecure = true\n'
        )
        here = ("--host", "127.0.0.1", "--port")
        with self._running("flower-superlink", "--insecure", *here, str(port)):
            _wait_for(port)
            with self._nodes(nodes, superlink=f"127.0.0.1:{port}"):
                self._run(f'num-rounds={rounds} num-nodes={nodes} size={size} result="{result}"')
        seconds: list[float] = json.loads(result.read_text())
        return seconds

    def _run(self, run_config: str) -> None:
        completed = subprocess.run(
            [self.bin / "flwr", "run", _APP, "lab", "--stream", "-c", run_config],
            cwd=self.folder,
            env=self.environ,
            capture_output=True,
            text=True,
            timeout=_RUN_TIMEOUT_S,
            check=False,
        )
        if completed.returncode != 0 or not (self.folder / "seconds.json").exists():
            raise SystemExit(f"flwr run failed:\n{completed.stdout}\n{completed.stderr}")

    @contextmanager
    def _nodes(self, num: int, *, superlink: str) -> Iterator[None]:
        if num == 0:
            yield
            return
        options = ("--host", "127.0.0.1", "--port", str(_free_port()))
        node = ("--node-config", f"partition-id={num - 1}")
        command = ("flower-supernode", "--insecure", "--superlink", superlink, *options, *node)
        with self._running(*command), self._nodes(num - 1, superlink=superlink):
            yield

    @contextmanager
    def _running(self, program: str, *options: str) -> Iterator[None]:
        """Run a program of Flower until the context is left."""
        with (self.folder / f"{program}.log").open("a") as log:
            process = subprocess.Popen(
                [self.bin / program, *options],
                cwd=self.folder,
                env=self.environ,
                stdout=log,
                stderr=subprocess.STDOUT,
            )
        try:
            yield
        finally:
            process.terminate()
            try:
                process.wait(timeout=20.0)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


def _free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port: int = server.getsockname()[1]
        return port


def _wait_for(port: int) -> None:
    """Wait until a process listens on the port.

    Raises:
        SystemExit: None did in time.
    """
    clock = SystemClock()
    end_s = clock.now_s() + _START_TIMEOUT_S
    while True:
        try:
            socket.create_connection(("127.0.0.1", port), timeout=1.0).close()
        except OSError as error:
            if clock.now_s() > end_s:
                raise SystemExit(f"no SuperLink listens on port {port}") from error
            clock.sleep(0.2)
        else:
            return
