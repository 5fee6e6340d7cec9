"""How much processor time threads take, from /proc."""

from __future__ import annotations

import contextlib
import os
import time
from collections import defaultdict
from pathlib import Path

from .servers import Server

TICKS = os.sysconf("SC_CLK_TCK")
OWN = "kvferry-"


def _times(pids: list[int]) -> dict[str, float]:
    """Seconds of processor time, by the name of the thread."""
    found: dict[str, float] = defaultdict(float)
    for pid in pids:
        for task in Path(f"/proc/{pid}/task").glob("*/stat"):
            with contextlib.suppress(OSError):
                head, _, rest = task.read_text().rpartition(")")
                fields = rest.split()
                found[head.partition("(")[2]] += (int(fields[11]) + int(fields[12])) / TICKS
    return found


class ThreadTimes:
    """Shares of a processor since it was made, for the threads of kvferry and for all others."""

    def __init__(self, servers: tuple[Server, ...]):
        self.servers = servers
        self.started = time.monotonic()
        self.before = {server.name: _times(server.pids()) for server in servers}

    def shares(self) -> str:
        passed = time.monotonic() - self.started
        parts = []
        for server in self.servers:
            before = self.before[server.name]
            spent = {name: seconds - before.get(name, 0) for name, seconds in _times(server.pids()).items()}
            own = {name: seconds for name, seconds in spent.items() if name.startswith(OWN)}
            others = sum(spent.values()) - sum(own.values())
            named = ", ".join(f"{name} {100 * seconds / passed:.2f} %" for name, seconds in sorted(own.items()))
            parts.append(f"{server.name}: {named or 'none of kvferry'}; others {100 * others / passed:.1f} %")
        return " | ".join(parts)
