"""NIXL: one-sided reads between two agents, as vLLM's NixlConnector does them (prepared lists, one transfer)."""

from __future__ import annotations

import base64
import os
import time
from typing import Any

import numpy as np
from _driver import Case, Holder, run

try:
    from nixl._api import nixl_agent, nixl_agent_config
except ImportError:
    from nixl_cu12._api import nixl_agent, nixl_agent_config

# What must live as long as the process.
_kept: list[Any] = []


def agent_of(name: str, memory: np.ndarray) -> Any:
    agent = nixl_agent(name, nixl_agent_config(backends=["UCX"]))
    registered = agent.register_memory([(memory.ctypes.data, memory.nbytes, 0, "")], "DRAM")
    _kept.extend((agent, memory, registered))
    return agent


def blocks_of(base: int, case: Case) -> list[tuple[int, int, int]]:
    return [(base + block * case.block_bytes, case.block_bytes, 0) for block in range(case.blocks * case.layers)]


def hold(case: Case) -> dict[str, Any]:
    memory = case.memory()
    case.fill(memory)
    agent = agent_of("holder", memory)
    return {"metadata": base64.b64encode(agent.get_agent_metadata()).decode(), "base": memory.ctypes.data}


class Reads:
    def __init__(self, case: Case, holder: Holder) -> None:
        self.case = case
        self.memory = case.memory()
        self.agent = agent_of("reader", self.memory)
        remote = self.agent.add_remote_agent(base64.b64decode(holder.held["metadata"]))
        self.ours = self.agent.prep_xfer_dlist("NIXL_INIT_AGENT", blocks_of(self.memory.ctypes.data, case), "DRAM")
        self.theirs = self.agent.prep_xfer_dlist(remote, blocks_of(holder.held["base"], case), "DRAM")
        self.local_ids, self.remote_ids = case.ids()
        self.lane = f"UCX_TLS={os.environ.get('UCX_TLS', '(unset)')}"
        self.bytes = case.bytes

    def turn(self) -> tuple[float, int, int]:
        self.memory.fill(0)
        local, remote = self.local_ids.astype(np.int32), self.remote_ids.astype(np.int32)
        begun = time.perf_counter()
        handle = self.agent.make_prepped_xfer("READ", self.ours, local, self.theirs, remote, b"")
        state = self.agent.transfer(handle)
        while state == "PROC":
            state = self.agent.check_xfer_state(handle)
        seconds = time.perf_counter() - begun
        if state != "DONE":
            raise SystemExit(f"NIXL's transfer ended as {state}")
        self.agent.release_xfer_handle(handle)
        return seconds, len(local), self.case.wrong(self.memory, self.local_ids, self.remote_ids)


if __name__ == "__main__":
    run(Reads, hold)
