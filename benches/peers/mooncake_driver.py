"""Mooncake's transfer engine over tcp: one synchronous batch of reads, as its vLLM connector does writes."""

from __future__ import annotations

import time
from typing import Any

from _driver import Case, Holder, run
from mooncake.engine import TransferEngine

HOST = "127.0.0.1"
_kept: list[Any] = []


def engine_of(memory: Any) -> Any:
    engine = TransferEngine()
    if engine.initialize(HOST, "P2PHANDSHAKE", "tcp", "") != 0:
        raise SystemExit("Mooncake's engine does not start")
    if engine.register_memory(memory.ctypes.data, memory.nbytes) != 0:
        raise SystemExit("Mooncake does not register the memory")
    _kept.extend((engine, memory))
    return engine


def hold(case: Case) -> dict[str, Any]:
    memory = case.memory()
    case.fill(memory)
    engine = engine_of(memory)
    return {"session": f"{HOST}:{engine.get_rpc_port()}", "base": memory.ctypes.data}


class Reads:
    lane = "tcp"

    def __init__(self, case: Case, holder: Holder) -> None:
        self.case, self.session = case, holder.held["session"]
        self.memory = case.memory()
        self.engine = engine_of(self.memory)
        self.ours, self.theirs = case.ids()
        self.local = [self.memory.ctypes.data + int(block) * case.block_bytes for block in self.ours]
        self.remote = [holder.held["base"] + int(block) * case.block_bytes for block in self.theirs]
        self.lengths = [case.block_bytes] * len(self.local)
        self.bytes = case.bytes

    def turn(self) -> tuple[float, int, int]:
        self.memory.fill(0)
        begun = time.perf_counter()
        status = self.engine.batch_transfer_sync_read(self.session, self.local, self.remote, self.lengths)
        seconds = time.perf_counter() - begun
        if status != 0:
            raise SystemExit(f"Mooncake's transfer ended with {status}")
        return seconds, len(self.local), self.case.wrong(self.memory, self.ours, self.theirs)


if __name__ == "__main__":
    run(Reads, hold)
