"""Figures: what a half has counted, through vLLM's envelopes, in Prometheus."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

prometheus = pytest.importorskip("prometheus_client")

from kvferry import _native  # noqa: E402
from kvferry.vllm import _stats  # noqa: E402
from kvferry.vllm._stats import Collector, KvferryPromMetrics, KvferryStats  # noqa: E402


def metrics() -> KvferryPromMetrics:
    types = {
        prometheus.Gauge: prometheus.Gauge,
        prometheus.Counter: prometheus.Counter,
        prometheus.Histogram: prometheus.Histogram,
    }
    config = SimpleNamespace(kv_transfer_config=None)
    return KvferryPromMetrics("KvferryConnector", config, types, ["model_name", "engine"], {0: ["m", "0"]})


def value(name: str, **labels: str) -> float | None:
    return prometheus.REGISTRY.get_sample_value(name, {"model_name": "m", "engine": "0", **labels})


def test_every_metric_is_there_from_the_start_and_grows() -> None:
    seen = metrics()
    # At 0: a rate sees the first event too.
    for cause in ("peer", "corrupt", "lease"):
        assert value("kvferry_loads_failed_total", cause=cause) == 0
    assert value("kvferry_leases_held") == 0 and value("kvferry_freeing_microseconds_count") == 0
    assert value("kvferry_lease_parts_total", end="expired") == 0
    before = 0
    seen.observe(
        {
            "counters": {"kvferry_loads_failed_total{lease}": 2, "kvferry_of_a_later_version_total": 1},
            "gauges": {"kvferry_leases_held": {"scheduler": 3}},
            "times": {"kvferry_confirmation_microseconds": ([0, 2, 1] + [0] * 14, 400)},
        }
    )
    assert value("kvferry_loads_failed_total", cause="lease") == before + 2
    assert value("kvferry_leases_held") == 3
    assert value("kvferry_confirmation_microseconds_bucket", le="50.0") == 0
    assert value("kvferry_confirmation_microseconds_bucket", le="100.0") == 2
    assert value("kvferry_confirmation_microseconds_bucket", le="250.0") == 3
    assert value("kvferry_confirmation_microseconds_bucket", le="+Inf") == 3
    assert value("kvferry_confirmation_microseconds_sum") == 400
    # A second connector of the process has the same metrics.
    again = metrics()
    again.observe({"gauges": {"kvferry_rank_leases{activated}": {"0": 4, "1": 5}}})
    assert value("kvferry_rank_leases", state="activated") == 9
    again.observe({"gauges": {"kvferry_rank_leases{activated}": {"1": 0}}})
    assert value("kvferry_rank_leases", state="activated") == 4


def test_ranks_and_intervals_add_up() -> None:
    first = KvferryStats({"counters": {"a": 1}, "gauges": {"g": {"0": 1}}, "times": {"t": ([1, 0], 5)}})
    second = KvferryStats({"counters": {"a": 2, "b": 1}, "gauges": {"g": {"1": 2}}, "times": {"t": ([1, 2], 7)}})
    both = first.aggregate(second)
    assert both.data == {
        "counters": {"a": 3, "b": 1},
        "gauges": {"g": {"0": 1, "1": 2}},
        "times": {"t": [[2, 2], 12]},
    }
    assert not both.is_empty()
    both.reset()
    assert both.is_empty()
    assert KvferryStats().is_empty()


def test_the_log_line_has_a_few_figures() -> None:
    shown = KvferryStats(
        {
            "counters": {
                "kvferry_loads_total": 3,
                "kvferry_loads_failed_total{peer}": 1,
                "kvferry_loads_failed_total{lease}": 1,
                "kvferry_read_bytes_total": 2_500_000,
                "kvferry_storage_loads_succeeded_total": 4,
                "kvferry_storage_loads_failed_total": 5,
                "kvferry_storage_loaded_bytes_total": 1_000_000,
            },
            "gauges": {},
            "times": {},
        }
    ).reduce()
    assert shown["loads"] == 3 and shown["loads failed"] == 2 and shown["MB read"] == 2.5
    assert shown["loads from storage"] == 4 and shown["loads from storage failed"] == 5
    assert shown["MB from storage"] == 1 and "MB saved" not in shown


def test_a_half_is_asked_when_something_has_happened_and_seldom_otherwise() -> None:
    asked = []

    def figures() -> tuple[dict[str, int], dict[str, int], dict[str, tuple[list[int], int]]]:
        asked.append(None)
        return {"a": 1} if len(asked) < 3 else {}, {}, {}

    side = SimpleNamespace(changed=True, half=SimpleNamespace(figures=figures))
    collector = Collector("0")
    assert collector.collect(side) is not None
    for _ in range(100):
        assert collector.collect(side) is None
    assert len(asked) == 1
    side.changed = True
    assert collector.collect(side) is not None
    side.changed = True
    # Nothing was counted: nothing is sent.
    assert collector.collect(side) is None
    assert len(asked) == 3


def test_the_metrics_are_those_of_the_page() -> None:
    described, bounds = _native.metrics("KvferryConnector")
    names = [row[0] for row in described]
    assert len(names) == len(set(names))
    assert {row[1] for row in described} == {"counter", "gauge", "histogram"}
    assert bounds == sorted(bounds)


def test_every_name_that_is_summed_up_for_the_log_exists() -> None:
    """And a histogram without buckets of its own, Ray's, is told each value's bound."""
    names = {row[0] for row in _native.metrics("KvferryConnector")[0]}
    for name in (
        "kvferry_loads_total",
        "kvferry_loads_failed_total",
        "kvferry_read_bytes_total",
        "kvferry_exports_total",
        "kvferry_lease_parts_total",
        "kvferry_storage_loads_succeeded_total",
        "kvferry_storage_loads_failed_total",
        "kvferry_storage_loaded_bytes_total",
        "kvferry_storage_saved_bytes_total",
    ):
        assert name in names
    seen: list[int] = []
    _stats._add(SimpleNamespace(observe=seen.append), [2, 0, 1] + [0] * 13 + [1], 500)
    bounds = _native.metrics("KvferryConnector")[1]
    assert seen == [bounds[0], bounds[0], bounds[2], bounds[-1] * 2]
