"""Figures, from the halves through vLLM to its log and to Prometheus.

A half gives what it has counted since it was last asked; vLLM adds the ranks' and hands the sums to its API server.
Names and meanings are those of docs/metrics.md.
"""

from __future__ import annotations

import time
from typing import Any

from kvferry import _native

try:
    from vllm.distributed.kv_transfer.kv_connector.v1.metrics import (
        KVConnectorPromMetrics,
        KVConnectorStats,
    )
except ImportError:

    class KVConnectorStats:  # type: ignore[no-redef]
        """As vLLM's."""

        def __init__(self, data: dict[str, Any] | None = None) -> None:
            self.data = {} if data is None else data

    class KVConnectorPromMetrics:  # type: ignore[no-redef]
        """As vLLM's."""

        def __init__(self, config: Any, types: Any, labelnames: list[str], values: dict[int, list[Any]]) -> None:
            self._labelnames = labelnames
            self.per_engine_labelvalues = values
            self._gauge_cls, self._counter_cls, self._histogram_cls = types.values()


# Seconds between two looks at a half that nothing has happened to.
INTERVAL = 1.0


class KvferryStats(KVConnectorStats):
    """Figures of one interval: `counters`, `gauges` (by key, per rank: the last value) and `times` (buckets, sum)."""

    data: dict[str, Any]

    def __init__(self, data: dict[str, Any] | None = None) -> None:
        super().__init__(data=data or {"counters": {}, "gauges": {}, "times": {}})

    def reset(self) -> None:
        self.data = {"counters": {}, "gauges": {}, "times": {}}

    def is_empty(self) -> bool:
        return not any(self.data.values())

    def aggregate(self, other: KVConnectorStats) -> KVConnectorStats:
        counters, gauges, times = (self.data[kind] for kind in ("counters", "gauges", "times"))
        for key, value in other.data["counters"].items():
            counters[key] = counters.get(key, 0) + value
        for key, ranks in other.data["gauges"].items():
            gauges.setdefault(key, {}).update(ranks)
        for key, (buckets, total) in other.data["times"].items():
            ours = times.get(key)
            if ours is None:
                times[key] = [list(buckets), total]
            else:
                times[key] = [[a + b for a, b in zip(ours[0], buckets, strict=True)], ours[1] + total]
        return self

    def reduce(self) -> dict[str, int | float]:
        """A few figures for vLLM's log line."""
        counters = self.data["counters"]

        def total(name: str) -> int:
            return sum(n for key, n in counters.items() if key.partition("{")[0] == name)

        shown: dict[str, int | float] = {
            "loads": total("kvferry_loads_total"),
            "loads failed": total("kvferry_loads_failed_total"),
            "MB read": round(total("kvferry_read_bytes_total") / 1e6, 1),
            "exports": total("kvferry_exports_total"),
            "leases released": counters.get("kvferry_lease_parts_total{released}", 0),
            "leases expired": counters.get("kvferry_lease_parts_total{expired}", 0),
        }
        stored = {
            "loads from storage": total("kvferry_storage_loads_succeeded_total"),
            "loads from storage failed": total("kvferry_storage_loads_failed_total"),
            "MB from storage": round(total("kvferry_storage_loaded_bytes_total") / 1e6, 1),
            "MB saved": round(total("kvferry_storage_saved_bytes_total") / 1e6, 1),
        }
        # Who has no directory has no such figures.
        return shown | {name: value for name, value in stored.items() if value}


class Collector:
    """Asks one half, at most once per INTERVAL unless something has happened."""

    def __init__(self, whose: str) -> None:
        self._whose = whose
        self._due = 0.0

    def collect(self, side: Any) -> KvferryStats | None:
        now = time.monotonic()
        if not side.changed and now < self._due:
            return None
        side.changed = False
        self._due = now + INTERVAL
        counters, gauges, times = side.half.figures()
        if not (counters or gauges or times):
            return None
        ranks = {key: {self._whose: value} for key, value in gauges.items()}
        return KvferryStats({"counters": counters, "gauges": ranks, "times": times})


_BOUNDS = _native.metrics("KvferryConnector")[1]

# Prometheus knows a name once per process, and two connectors may have the same ones.
_registered: dict[tuple[str, Any], Any] = {}


class KvferryPromMetrics(KVConnectorPromMetrics):
    """A connector's metrics in the API server's registry, with vLLM's labels before their own."""

    def __init__(
        self,
        connector: str,
        vllm_config: Any,
        metric_types: dict[Any, Any],
        labelnames: list[str],
        per_engine_labelvalues: dict[int, list[Any]],
    ) -> None:
        super().__init__(vllm_config, metric_types, labelnames, per_engine_labelvalues)
        described, bounds = _native.metrics(connector)
        self._metrics = {
            name: (kind, label, self._metric(name, kind, unit, label, text, bounds))
            for name, kind, unit, label, text, _ in described
        }
        self._values = per_engine_labelvalues
        # Every series is there from the start: a rate sees the first event too.
        for name, _, _, label, _, values in described:
            for own in per_engine_labelvalues.values():
                for value in values if label else [None]:
                    self._metrics[name][2].labels(*own, *([value] if value else []))
        # The latest value of each rank's gauge: what is shown is their sum.
        self._ranks: dict[tuple[int, str], dict[str, int]] = {}

    def _metric(self, name: str, kind: str, unit: str, label: str | None, text: str, bounds: list[int]) -> Any:
        labels = [*self._labelnames, *([label] if label else [])]
        kinds: dict[str, tuple[Any, dict[str, Any]]] = {
            "counter": (self._counter_cls, {}),
            "gauge": (self._gauge_cls, {"multiprocess_mode": "mostrecent"}),
            "histogram": (self._histogram_cls, {"buckets": bounds}),
        }
        cls, more = kinds[kind]
        key = (name, cls)
        if key not in _registered:
            text = f"{text} ({unit})." if unit else f"{text}."
            _registered[key] = cls(name=name, documentation=text, labelnames=labels, **more)
        return _registered[key]

    def _child(self, key: str, engine: int) -> tuple[str, Any] | None:
        name, _, value = key.partition("{")
        found = self._metrics.get(name)
        if found is None:
            return None
        kind, label, metric = found
        values = [*self._values[engine], *([value.rstrip("}")] if label else [])]
        return kind, metric.labels(*values)

    def observe(self, transfer_stats_data: dict[str, Any], engine_idx: int = 0) -> None:
        """Adds an interval's figures. Names that this version does not know are left out."""
        for key, grown in transfer_stats_data.get("counters", {}).items():
            if (found := self._child(key, engine_idx)) is not None:
                found[1].inc(grown)
        for key, ranks in transfer_stats_data.get("gauges", {}).items():
            if (found := self._child(key, engine_idx)) is not None:
                known = self._ranks.setdefault((engine_idx, key), {})
                known.update(ranks)
                found[1].set(sum(known.values()))
        for key, (buckets, total) in transfer_stats_data.get("times", {}).items():
            if (found := self._child(key, engine_idx)) is not None:
                _add(found[1], buckets, total)


def _add(histogram: Any, buckets: list[int], total: int) -> None:
    """Adds what was counted in buckets: prometheus_client has no call for it, but keeps the same buckets."""
    if not hasattr(histogram, "_buckets"):
        # Ray's: each as the bound of its bucket.
        bounds = [*_BOUNDS, _BOUNDS[-1] * 2]
        for bound, grown in zip(bounds, buckets, strict=True):
            for _ in range(grown):
                histogram.observe(bound)
        return
    for bucket, grown in zip(histogram._buckets, buckets, strict=True):
        if grown:
            bucket.inc(grown)
    histogram._sum.inc(total)
