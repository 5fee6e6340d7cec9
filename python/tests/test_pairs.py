"""Two engines whose connectors meet, without vLLM: what goes together, and what is refused in which words."""

from __future__ import annotations

import random
import time
from types import SimpleNamespace
from typing import Any

import pytest
from fakes import Storage, Tensor, blocks, cache_config, request, step, vllm_config
from kvferry import _native
from kvferry.vllm import _setup
from kvferry.vllm._messages import Handshake, Plan, Reports
from kvferry.vllm._scheduler import SchedulerSide
from kvferry.vllm._worker import Results, WorkerSide

LAYERS = [f"model.layers.{n}.self_attn.attn" for n in range(2)]
BLOCKS, TOKENS = 16, 32
BLOCK_BYTES = 4 * TOKENS * 16 * 4
PROMPT = list(range(100))
PATIENCE = 20.0


class Engine:
    """An engine of one rank, whose steps we take by hand."""

    def __init__(self, name: str, layers: list[str] = LAYERS, **changes: Any) -> None:
        extra = changes.pop("extra", {})
        vllm = vllm_config(name, **extra)
        for path, value in changes.items():
            section, _, field = path.partition("__")
            setattr(getattr(vllm, section), field, value)
        config = cache_config([{"layer_names": layers, "block_size": TOKENS}], BLOCKS)
        setup = _setup.of("KvferryConnector", vllm, config)
        self.storage = Storage(len(layers) * BLOCKS * BLOCK_BYTES, shift=64)
        per_layer = BLOCKS * BLOCK_BYTES // 4
        caches = {
            layer: Tensor(self.storage, [BLOCKS, 4, TOKENS, 16], [2048, 512, 16, 1], number * per_layer)
            for number, layer in enumerate(layers)
        }
        self.worker = WorkerSide(setup, 0, config, "cpu")
        self.worker.register(caches)
        self.scheduler = SchedulerSide(setup)
        description = self.worker.describe()
        assert description is not None
        self.scheduler.publish({(0, 0): Handshake(description, setup.digest)})

    def block(self, layer: int, number: int) -> bytes:
        return self.storage.read((layer * BLOCKS + number) * BLOCK_BYTES, BLOCK_BYTES)

    def turn(self, output: Any = None) -> Results:
        plan = Plan(self.scheduler.build_step(output or step()))
        assert plan.plan, "a step without a plan"
        self.worker.release(plan.plan)
        self.worker.begin(plan.plan)
        self.worker.end()
        results = self.worker.results()
        if results.report is not None:
            meta = Reports(((0, results.report),))
            self.scheduler.on_output(SimpleNamespace(kv_connector_worker_meta=meta))
        return results

    def until(self, kind: str, name: str) -> Results:
        deadline = time.monotonic() + PATIENCE
        while name not in getattr(results := self.turn(), kind):
            assert time.monotonic() < deadline, f"{name} is not {kind}"
            time.sleep(0.002)
        return results

    def matched(self, asked: Any) -> tuple[int | None, bool]:
        """The lookup's answer, once it is known."""
        deadline = time.monotonic() + PATIENCE
        while (found := self.scheduler.matched_tokens(asked, 0))[0] is None:
            assert time.monotonic() < deadline
            time.sleep(0.002)
        return found

    def exported(self, name: str, ids: list[int]) -> dict[str, Any]:
        asked = request(name, PROMPT, {"do_remote_decode": True})
        self.scheduler.new_request(asked)
        assert self.matched(asked) == (0, False)
        self.scheduler.after_alloc(asked, blocks(ids), 0)
        self.turn(step(new={name: ((ids,), 0, len(PROMPT))}))
        asked.num_computed_tokens = len(PROMPT)
        asked.status = SimpleNamespace(name="FINISHED_LENGTH_CAPPED")
        hold, params = self.scheduler.finished(asked, (ids,))
        assert hold and params is not None
        self.turn()
        return params

    def loaded(self, name: str, params: dict[str, Any], ids: list[int]) -> Results:
        asked = request(name, PROMPT, params)
        self.scheduler.new_request(asked)
        assert self.matched(asked) == (len(PROMPT), True)
        self.scheduler.after_alloc(asked, blocks(ids), len(PROMPT))
        return self.until("received", name)

    def end(self) -> None:
        self.worker.shutdown()
        self.scheduler.shutdown()


@pytest.fixture
def lines() -> Any:
    """The native log lines of a test, which nobody else fetches meanwhile."""
    _native.start_log(20)
    found: list[str] = []

    def so_far() -> str:
        while batch := _native.next_log_lines(0.05):
            found.extend(text for _, _, text, _ in batch)
        return "\n".join(found)

    so_far()
    found.clear()
    return so_far


def test_blocks_are_read_and_freed_by_notification() -> None:
    prefill, decode = Engine("prefill"), Engine("decode")
    prefill.storage.write(0, random.Random(1).randbytes(prefill.storage.size))
    before = decode.storage.read(0, decode.storage.size)
    params = prefill.exported("p", [3, 9, 4, 5])
    results = decode.loaded("d", params, [7, 8, 1, 2])
    assert results.received == {"d"} and not results.failed
    for layer in range(2):
        for theirs, ours in zip([3, 9, 4, 5], [7, 8, 1, 2], strict=True):
            assert decode.block(layer, ours) == prefill.block(layer, theirs), (layer, ours)
        # Nothing else was touched.
        for other in sorted(set(range(BLOCKS)) - {7, 8, 1, 2}):
            start = (layer * BLOCKS + other) * BLOCK_BYTES
            assert decode.block(layer, other) == before[start : start + BLOCK_BYTES]
    assert prefill.until("sent", "p").sent == {"p"}
    _, _, times = decode.worker.half.figures()
    for name in ("handshake", "confirmation"):
        assert sum(times[f"kvferry_{name}_microseconds"][0]) == 1
    decode.end()
    prefill.end()


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"model_config__model": "another"}, "model"),
        ({"cache_config__cache_dtype": "fp8"}, "cache dtype and layout"),
        ({"layers": LAYERS[:1]}, "kv_tables"),
    ],
)
def test_c40_engines_that_do_not_go_together_are_refused_and_the_field_is_named(
    changes: dict[str, Any], field: str, lines: Any
) -> None:
    prefill, decode = Engine("prefill"), Engine("decode", **changes)
    params = prefill.exported("p", [3, 9, 4, 5])
    results = decode.loaded("d", params, [7, 8, 1, 2])
    assert results.received == results.failed == {"d"}
    assert f"the engines differ in {field}" in lines()
    counters, _, _ = decode.scheduler.half.figures()
    assert sum(n for key, n in counters.items() if key.startswith("kvferry_loads_failed_total{")) == 1
    # The request is computed then, and finished: nothing is held here.
    asked = request("d", PROMPT, params, num_computed_tokens=100, status=SimpleNamespace(name="FINISHED_LENGTH_CAPPED"))
    assert decode.scheduler.finished(asked, ([7, 8, 1, 2],)) == (False, None)
    decode.end()
    prefill.end()


def test_other_numbers_of_ranks_are_refused_and_the_field_is_named(lines: Any) -> None:
    prefill, decode = Engine("prefill"), Engine("decode", parallel_config__pipeline_parallel_size=1)
    params = {**prefill.exported("p", [3, 9, 4, 5]), "tp_size": 2}
    asked = request("d", PROMPT, params)
    decode.scheduler.new_request(asked)
    if decode.scheduler.matched_tokens(asked, 0)[0]:
        decode.scheduler.after_alloc(asked, blocks([7, 8, 1, 2]), len(PROMPT))
        assert decode.until("received", "d").failed == {"d"}
    assert "rank" in lines()
    decode.end()
    prefill.end()


def test_a_shared_directory_behind_the_connector_is_searched_where_no_producer_offers(tmp_path: Any) -> None:
    extra = {"shared_storage_path": str(tmp_path)}
    first = Engine("first", extra=extra)
    assert first.scheduler.reads_tokens and first.scheduler.half.requires_delivery
    first.storage.write(0, random.Random(2).randbytes(first.storage.size))
    params = first.exported("p", [3, 9, 4, 5])
    # Held for a consumer and for the saves: the one that is asked for first does not free what the other still needs.
    second = Engine("second", extra=extra)
    assert not second.loaded("d", params, [7, 8, 1, 2]).failed
    assert first.until("sent", "p").sent == {"p"}
    first.end()
    third = Engine("third", extra=extra)
    asked = request("x", PROMPT)
    third.scheduler.new_request(asked)
    assert third.matched(asked) == (96, True)
    third.scheduler.after_alloc(asked, blocks([5, 6, 7]), 96)
    assert not third.until("received", "x").failed
    for layer in range(2):
        for theirs, ours in zip([3, 9, 4], [5, 6, 7], strict=True):
            assert third.block(layer, ours) == first.block(layer, theirs)
    counters, _, _ = third.worker.half.figures()
    assert counters["kvferry_storage_blocks_loaded_total"] == 3
    for engine in (second, third):
        engine.end()
