"""The configurations of servers that scenarios ask for."""

from __future__ import annotations

from ..pair import Setup
from ..settings import SHORT_LEASE

MAIN = Setup("main", "failed loads are computed again, UCX chooses its transports")
SHORT = Setup("short", f"a lease of {SHORT_LEASE:.0f} s", lease=SHORT_LEASE)
TCP = Setup("tcp", "UCX_TLS=tcp, a producer and a consumer", environment=(("UCX_TLS", "tcp"),), roles=True)
LIBUCX = Setup(
    "libucx",
    "the UCX of the Python package, blocks served over it and verified",
    extra=(("ucx", "libucx"), ("lane", "served"), ("verify", True)),
    needs="libucx",
)
MULTI = Setup("multi", "both connectors under vLLM's MultiConnector", storage=True)
SLIDING = Setup("sliding", "a model with sliding-window and full layers", model="sliding")
TP2 = Setup(
    "tp2",
    "two ranks on each side, loads verified",
    extra=(("verify", True),),
    arguments=("--tensor-parallel-size", "2"),
)
NIXL = Setup("nixl", "NixlConnector, to compare with", connector="nixl")
IN_PROCESS = Setup("in-process", "offline engines, both halves of a connector in one process", bare=True)
