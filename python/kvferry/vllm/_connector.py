"""The connectors, as vLLM 0.32 drives them (`KVConnectorBase_V1`).

Responsible for nothing but who is called when: what vLLM's objects mean is in `_scheduler` and `_worker`, what is done
is in the native halves. Hooks that only other versions of vLLM call are harmless.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable
from typing import Any, ClassVar

from vllm.distributed.kv_transfer.kv_connector.v1 import base as vllm_base
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorRole,
    SupportsHMA,
)

from kvferry import _log
from kvferry.vllm import _siblings
from kvferry.vllm._messages import Handshake, Plan, Reports
from kvferry.vllm._scheduler import SchedulerSide
from kvferry.vllm._setup import of
from kvferry.vllm._stats import Collector, KvferryPromMetrics, KvferryStats
from kvferry.vllm._worker import Results, WorkerSide

try:
    from vllm.v1.metrics.cache_hit_source import CacheHitSource
except ImportError:
    CacheHitSource = None  # type: ignore[assignment, misc]

logger = logging.getLogger("vllm.kvferry")

_REMOTE = "KvferryConnector"

# Versions before `get_transfer_results` ask for a tuple.
_TransferResults = getattr(vllm_base, "KVConnectorTransferResults", None)


class _Connector(KVConnectorBase_V1, SupportsHMA):
    """What both connectors share: one half, the scheduler's or a worker's."""

    NAME: ClassVar[str]

    def __init__(self, vllm_config: Any, role: KVConnectorRole, kv_cache_config: Any = None) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        _log.start("vllm.kvferry")
        setup = of(self.NAME, vllm_config, kv_cache_config)
        self._setup = setup
        self._scheduler: SchedulerSide | None = None
        self._worker: WorkerSide | None = None
        self._results = Results()
        if role == KVConnectorRole.SCHEDULER:
            self._place = "scheduler"
            self._join()
            try:
                self._scheduler = SchedulerSide(setup)
            except BaseException:
                self._leave()
                raise
            self._collector = Collector("scheduler")
        else:
            rank = setup.rank(*_worker_rank())
            self._place = f"worker {rank}"
            self._join()
            device = vllm_config.kv_transfer_config.kv_buffer_device or ""
            self._worker = WorkerSide(setup, rank, kv_cache_config, device)
            self._collector = Collector(str(rank))

    def _join(self) -> None:
        setup = self._setup
        _siblings.join(self, self.NAME, setup.engine_id, self._place, setup.has_directory)

    def _leave(self) -> None:
        _siblings.leave(self, self._setup.engine_id, self._place)

    def _of_scheduler(self) -> SchedulerSide:
        assert self._scheduler is not None, "a hook of the scheduler was called on a worker"
        return self._scheduler

    def _of_worker(self) -> WorkerSide:
        assert self._worker is not None, "a hook of a worker was called on the scheduler"
        return self._worker

    # --- Scheduler ---

    def on_new_request(self, request: Any) -> None:
        self._of_scheduler().new_request(request)

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> tuple[int | None, bool]:
        return self._of_scheduler().matched_tokens(request, num_computed_tokens)

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        self._of_scheduler().after_alloc(request, blocks, num_external_tokens)

    def build_connector_meta(self, scheduler_output: Any) -> Plan:
        return Plan(self._of_scheduler().build_step(scheduler_output))

    def update_connector_output(self, connector_output: Any) -> None:
        self._of_scheduler().on_output(connector_output)

    def request_finished(self, request: Any, block_ids: list[int]) -> tuple[bool, dict[str, Any] | None]:
        return self._of_scheduler().finished(request, (block_ids,))

    def request_finished_all_groups(
        self, request: Any, block_ids: tuple[list[int], ...]
    ) -> tuple[bool, dict[str, Any] | None]:
        return self._of_scheduler().finished(request, block_ids)

    def get_loaded_kv_cache_group_ids(self, request: Any) -> tuple[int, ...]:
        return self._setup.groups

    def has_pending_push_work(self) -> bool:
        """Whether steps are needed although no request computes: an order that waits for the workers."""
        return self._scheduler is not None and self._scheduler.half.has_pending_work()

    def set_xfer_handshake_metadata_pp_aware(self, metadata: dict[tuple[int, int], Any]) -> None:
        self._of_scheduler().publish(metadata)

    def set_xfer_handshake_metadata(self, metadata: dict[int, Any]) -> None:
        self._of_scheduler().publish({(0, tp): blob for tp, blob in metadata.items()})

    def take_events(self) -> Iterable[Any]:
        return ()

    # --- Worker ---

    def register_kv_caches(self, kv_caches: dict[str, Any]) -> None:
        self._of_worker().register(kv_caches)

    def get_handshake_metadata(self) -> Handshake | None:
        description = self._of_worker().describe()
        return None if description is None else Handshake(description, self._setup.digest)

    def handle_preemptions(self, kv_connector_metadata: Any) -> None:
        # Older versions pass the ids of preempted requests.
        if isinstance(kv_connector_metadata, Plan):
            self._of_worker().release(kv_connector_metadata.plan)

    def bind_connector_metadata(self, connector_metadata: Any) -> None:
        super().bind_connector_metadata(connector_metadata)
        self._of_worker().begin(connector_metadata.plan)

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        """Loads began with the step: they need no forward."""

    def wait_for_layer_load(self, layer_name: str) -> None:
        """No load is synchronous."""

    def save_kv_layer(self, layer_name: str, kv_layer: Any, attn_metadata: Any, **kwargs: Any) -> None:
        """Saves begin when the step's forward is over."""

    def wait_for_save(self) -> None:
        self._of_worker().end()

    def get_finished(self, finished_req_ids: set[str]) -> tuple[set[str] | None, set[str] | None]:
        self._results = self._of_worker().results()
        return self._results.sent or None, self._results.received or None

    def get_transfer_results(self, finished_req_ids: set[str]) -> Any:
        results = self._results = self._of_worker().results()
        assert _TransferResults is not None
        return _TransferResults(
            finished_sending=results.sent,
            finished_recving=results.received,
            failed_recving=results.failed,
        )

    def build_connector_worker_meta(self) -> Reports | None:
        report, self._results = self._results.report, Results()
        return None if report is None else Reports(((self._of_worker().rank, report),))

    # --- Both ---

    def get_kv_connector_stats(self) -> KvferryStats | None:
        side: Any = self._scheduler or self._worker
        return self._collector.collect(side)

    def shutdown(self) -> None:
        side: Any = self._scheduler or self._worker
        side.shutdown()
        self._leave()

    def reset_cache(self) -> bool:
        """Whether nothing of before can be found any more; files in a directory can."""
        if self._setup.has_directory:
            logger.error(
                "%s: the files below shared_storage_path are not removed when the cache is reset: engines with other "
                "weights need another directory, or another --revision",
                self.NAME,
            )
            return False
        return True

    @classmethod
    def build_kv_connector_stats(cls, data: dict[str, Any] | None = None) -> KvferryStats:
        return KvferryStats(data)

    @classmethod
    def build_prom_metrics(
        cls,
        vllm_config: Any,
        metric_types: dict[Any, Any],
        labelnames: list[str],
        per_engine_labelvalues: dict[int, list[Any]],
    ) -> KvferryPromMetrics:
        return KvferryPromMetrics(cls.NAME, vllm_config, metric_types, labelnames, per_engine_labelvalues)


class KvferryConnector(_Connector):
    """Reads the blocks that another server has computed, under a lease, and frees them by notification."""

    NAME = _REMOTE

    @property
    def requires_kv_delivery(self) -> bool:
        return bool(self._kv_transfer_config.is_kv_producer)

    def get_external_cache_hit_sources(self, request: Any, num_external_tokens: int) -> dict[Any, int]:
        if num_external_tokens == 0 or CacheHitSource is None:
            return {}
        params = request.kv_transfer_params or {}
        is_remote = bool(params.get("do_remote_prefill"))
        return {CacheHitSource.P2P if is_remote else CacheHitSource.DISK: num_external_tokens}


class KvferryStorageConnector(_Connector):
    """Keeps blocks in a directory that any number of servers share; best-effort."""

    NAME = "KvferryStorageConnector"

    if CacheHitSource is not None:
        _cache_hit_source = CacheHitSource.DISK

    @property
    def requires_kv_delivery(self) -> bool:
        return False

    def get_handshake_metadata(self) -> None:
        return None

    def set_xfer_handshake_metadata_pp_aware(self, metadata: Any) -> None:
        """Of another child of a MultiConnector: nobody connects to this one."""

    def set_xfer_handshake_metadata(self, metadata: Any) -> None:
        """As above."""


def _worker_rank() -> tuple[int, int]:
    """Pipeline and tensor rank of this worker."""
    from vllm.distributed.parallel_state import get_pp_group, get_tensor_model_parallel_rank

    return get_pp_group().rank_in_group, get_tensor_model_parallel_rank()


__all__ = ["KvferryConnector", "KvferryStorageConnector"]
