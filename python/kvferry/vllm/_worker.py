"""A worker's side: the tensors that vLLM registers, and its steps, as the native half wants them. Duck-typed."""

from __future__ import annotations

import logging
from dataclasses import dataclass, field
from typing import Any

from kvferry._native import ConfigurationError, WorkerHalf
from kvferry.vllm._setup import Setup

logger = logging.getLogger("vllm.kvferry")


@dataclass
class Results:
    """What has ended since the last step."""

    received: set[str] = field(default_factory=set)
    failed: set[str] = field(default_factory=set)
    sent: set[str] = field(default_factory=set)
    report: bytes | None = None


class WorkerSide:
    """One rank's worker half; it is made when the tensors are there."""

    def __init__(self, setup: Setup, rank: int, kv_cache_config: Any, buffer_device: str) -> None:
        self.setup = setup
        self.rank = rank
        self._config = kv_cache_config
        self._buffer_device = buffer_device
        self._half: WorkerHalf | None = None
        # They must live as long as the half does.
        self._caches: Any = None
        self._released: bytes | None = None
        self.changed = True

    @property
    def half(self) -> WorkerHalf:
        if self._half is None:
            raise RuntimeError(f"{self.setup.connector}: no tensors were registered")
        return self._half

    def register(self, caches: dict[str, Any]) -> None:
        if self._half is not None:
            raise RuntimeError(f"{self.setup.connector}: tensors were registered before")
        all_groups = self._config.kv_cache_groups
        groups = [
            (list(all_groups[number].layer_names), all_groups[number].kv_cache_spec.block_size)
            for number in self.setup.groups
        ]
        tensors = [
            self._describe(layer, tensor)
            for layer, cache in caches.items()
            for tensor in (cache if isinstance(cache, (list, tuple)) else (cache,))
        ]
        self._caches = caches
        self._half = WorkerHalf(self.setup.text, self.rank, tensors, groups, self._config.num_blocks)
        for note in self._half.notes:
            logger.info("%s: %s", self.setup.connector, note)

    def _describe(self, layer: str, tensor: Any) -> tuple[Any, ...]:
        device = tensor.device
        if device.type not in ("cpu", "cuda"):
            raise ConfigurationError(
                f"{layer}: its cache is on device {device}; {self.setup.connector} moves cpu and cuda memory"
            )
        if self._buffer_device not in (device.type, ""):
            raise ConfigurationError(
                f"kv_buffer_device is {self._buffer_device!r}, but {layer} has its cache on {device}, and "
                f"{self.setup.connector} moves it from there without a buffer: set it to {device.type!r} or leave it "
                "out"
            )
        storage, item = tensor.untyped_storage(), tensor.element_size()
        return (
            layer,
            storage.data_ptr(),
            storage.nbytes(),
            tensor.storage_offset() * item,
            list(tensor.shape),
            list(tensor.stride()),
            item,
            (device.index or 0) if device.type == "cuda" else None,
        )

    def describe(self) -> bytes | None:
        return self.half.describe()

    def release(self, plan: bytes) -> None:
        self.half.release_blocks(plan)
        self._released = plan

    def begin(self, plan: bytes) -> None:
        if self._released is not plan:
            self.half.release_blocks(plan)
        self._released = None
        self.half.begin_step(plan)

    def end(self) -> None:
        self.half.end_step()

    def results(self) -> Results:
        received, failed, sent, report = self.half.take_report()
        if report is not None:
            self.changed = True
        return Results(set(received), set(failed), set(sent), report)

    def shutdown(self) -> None:
        if self._half is not None:
            self._half.shutdown()
            self._caches = None
