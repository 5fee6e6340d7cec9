"""Mooncake's transfer engine over tcp: synchronous batches of reads, as its vLLM connector does writes."""

from __future__ import annotations

import time
from typing import Any

from _driver import Case, Holder, run
from mooncake.engine import TransferEngine

HOST = "127.0.0.1"
# Requests of a batch: its queue over tcp is full with some thousands.
BATCH = 1024
# Bytes of a turn at most; 0.1 GB/s are usual.
MOST = 1 << 25
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
        count = max(1, MOST // case.block_bytes)
        self.ours, self.theirs = (ids[:count] for ids in case.ids())
        self.local = [self.memory.ctypes.data + int(block) * case.block_bytes for block in self.ours]
        self.remote = [holder.held["base"] + int(block) * case.block_bytes for block in self.theirs]
        self.bytes = case.block_bytes * len(self.local)

    def turn(self) -> tuple[float, int, int]:
        self.memory.fill(0)
        begun = time.perf_counter()
        for at in range(0, len(self.local), BATCH):
            local, remote = self.local[at : at + BATCH], self.remote[at : at + BATCH]
            lengths = [self.case.block_bytes] * len(local)
            if (status := self.engine.batch_transfer_sync_read(self.session, local, remote, lengths)) != 0:
                raise SystemExit(f"Mooncake's transfer ended with {status}")
        seconds = time.perf_counter() - begun
        return seconds, len(self.local), self.case.wrong(self.memory, self.ours, self.theirs)


if __name__ == "__main__":
    run(Reads, hold)
