"""Visitors of a dashboard, as many requests a minute as asked for, from a process of their own.

It reads commands from standard input, one JSON object per line, and answers each with one.
``{"do": "visit", "seconds": 10, "per_minute": 5000}`` visits, and answers how many pages came and
how long they took.
"""

import http.client
import json
import statistics
import sys
import threading
from itertools import cycle

from fedlearn.core.clock import SystemClock

_VISITORS = 16
_OK = 200


class Visits:
    """Requests that the visitors share; ``paths`` are asked for in turn."""

    def __init__(self, address: str, paths: list[str]) -> None:
        self._address, self._paths = address, cycle(paths)
        self._clock, self._lock = SystemClock(), threading.Lock()

    def visit(self, *, seconds: float, per_minute: float) -> dict[str, object]:
        """Ask for pages at regular times, and return how that went."""
        self._next_s = self._clock.now_s()
        self._end_s = self._next_s + seconds
        self._pause_s, self._took_s = 60.0 / per_minute, list[float]()
        visitors = [threading.Thread(target=self._ask_repeatedly) for _ in range(_VISITORS)]
        for each in visitors:
            each.start()
        for each in visitors:
            each.join()
        took_s = self._took_s
        return {"num": len(took_s), "median_s": statistics.median(took_s) if took_s else 0.0}

    def _ask_repeatedly(self) -> None:
        host, _, port = self._address.rpartition(":")
        connection = http.client.HTTPConnection(host, int(port), timeout=60)
        while (turn := self._take_turn()) is not None:
            due_s, path = turn
            self._clock.sleep(max(0.0, due_s - self._clock.now_s()))
            began_s = self._clock.now_s()
            connection.request("GET", path)
            answer = connection.getresponse()
            answer.read()
            if answer.status != _OK:
                raise SystemExit(f"{path}: {answer.status}")
            with self._lock:
                self._took_s.append(self._clock.now_s() - began_s)
        connection.close()

    def _take_turn(self) -> tuple[float, str] | None:
        with self._lock:
            due_s = self._next_s
            self._next_s += self._pause_s
            return None if due_s >= self._end_s else (due_s, next(self._paths))


def main(address: str, *paths: str) -> None:
    """Answer commands until standard input ends."""
    visits = Visits(address, list(paths))
    for line in sys.stdin:
        command = json.loads(line)
        del command["do"]
        print(json.dumps(visits.visit(**command)), flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
