"""What passes between a connector's halves through vLLM: bytes of the native halves, in vLLM's envelopes.

Without vLLM (unit tests) the envelopes have no base classes.
"""

from __future__ import annotations

from typing import Any

try:
    from vllm.distributed.kv_transfer.kv_connector.v1.base import (
        KVConnectorHandshakeMetadata,
        KVConnectorMetadata,
        KVConnectorWorkerMetadata,
    )
except ImportError:
    KVConnectorHandshakeMetadata = KVConnectorMetadata = KVConnectorWorkerMetadata = object  # type: ignore[assignment, misc]


class Plan(KVConnectorMetadata):
    """A step's orders to the workers."""

    __slots__ = ("plan",)

    def __init__(self, plan: bytes) -> None:
        self.plan = plan

    def __reduce__(self) -> Any:
        return Plan, (self.plan,)


class Handshake(KVConnectorHandshakeMetadata):
    """What consumers are told of a rank."""

    __slots__ = ("description", "digest")

    def __init__(self, description: bytes, digest: str) -> None:
        self.description = description
        # Of the settings that the rank's process has.
        self.digest = digest

    def __reduce__(self) -> Any:
        return Handshake, (self.description, self.digest)


class Reports(KVConnectorWorkerMetadata):
    """What ranks report after a step: (rank, report) each."""

    __slots__ = ("reports",)

    def __init__(self, reports: tuple[tuple[int, bytes], ...]) -> None:
        self.reports = reports

    def aggregate(self, other: Any) -> Reports:
        return Reports(self.reports + other.reports)

    def __reduce__(self) -> Any:
        return Reports, (self.reports,)
