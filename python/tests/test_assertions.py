"""What vLLM's scheduler asserts of a connector, held against random lives of requests between two engines.

The numbers are those of vLLM 0.32: a hook that answers otherwise ends its engine.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
from fakes import blocks, request, step
from kvferry.vllm._stats import KvferryPromMetrics, KvferryStats
from test_pairs import PATIENCE, PROMPT, Engine


class Strict:
    """An engine's requests as vLLM's scheduler knows them, and its assertions."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        # Asynchronous loads that it waits for, and finished requests whose blocks it keeps.
        self.parked: set[str] = set()
        self.held: set[str] = set()

    def lookup(self, asked: Any, computed: int) -> tuple[int, bool]:
        for _ in range(2):
            # Asked any number of times, it says the same.
            tokens, later = found = self.engine.scheduler.matched_tokens(asked, computed)
            assert tokens is not None
            assert tokens > 0 or not later, "(0, True) is no answer"
            assert computed + tokens <= asked.num_prompt_tokens - (0 if later else 1), "beyond the prompt"
        return found  # type: ignore[return-value]

    def park(self, asked: Any, ids: list[int], tokens: int) -> None:
        self.engine.scheduler.after_alloc(asked, blocks(ids), tokens)
        if tokens:
            self.parked.add(asked.request_id)

    def finish(self, asked: Any, ids: list[int], status: str) -> dict[str, Any] | None:
        asked.status = SimpleNamespace(name=status)
        hold, params = self.engine.scheduler.finished(asked, (ids,))
        assert hold or params is None
        if hold:
            assert asked.request_id not in self.parked, "held while it is loaded"
            self.held.add(asked.request_id)
        return params

    def turn(self, output: Any = None) -> None:
        results = self.engine.turn(output)
        assert results.received <= self.parked, (
            f"{results.received - self.parked} were never parked, or reported before"
        )
        assert results.failed <= results.received, "failed and not received"
        assert results.sent <= self.held, f"{results.sent - self.held} were not held, or reported before"
        assert not results.sent & results.received
        self.parked -= results.received
        self.held -= results.sent

    def turn_until(self, happened: Callable[[], bool]) -> None:
        deadline = time.monotonic() + PATIENCE
        while not happened():
            assert time.monotonic() < deadline, f"never reported: {self.parked}, {self.held}"
            self.turn()
            time.sleep(0.001)


def prefilled(prefill: Strict, name: str, ids: list[int], status: str) -> dict[str, Any] | None:
    asked = request(name, PROMPT, {"do_remote_decode": True})
    prefill.engine.scheduler.new_request(asked)
    assert prefill.lookup(asked, 0) == (0, False)
    prefill.park(asked, ids, 0)
    prefill.turn(step(new={name: ((ids,), 0, len(PROMPT))}))
    asked.num_computed_tokens = len(PROMPT)
    params = prefill.finish(asked, ids, status)
    prefill.turn()
    return params


def decoded(decode: Strict, name: str, ids: list[int], params: dict[str, Any] | None, rng: random.Random) -> None:
    """One life of a request, up to the moment at which vLLM forgets it or waits for the connector."""
    asked = request(name, PROMPT, params)
    decode.engine.scheduler.new_request(asked)
    life = rng.choice(["whole", "whole", "hit", "full hit", "nothing", "rejected", "aborted", "aborted early", "again"])
    if life == "rejected":
        decode.finish(asked, [], "FINISHED_ABORTED")
        return
    computed = {"hit": 64, "full hit": 96}.get(life, 0)
    tokens, _ = decode.lookup(asked, computed)
    if life == "aborted early":
        decode.finish(asked, [], "FINISHED_ABORTED")
        return
    decode.park(asked, ids, 0 if life == "nothing" else tokens)
    if life == "aborted":
        for _ in range(rng.randrange(3)):
            decode.turn()
        decode.finish(asked, ids, "FINISHED_ABORTED")
        return
    decode.turn_until(lambda: name not in decode.parked)
    # Looked up again after its load, and allocated again with nothing.
    asked.num_computed_tokens = len(PROMPT)
    if life == "again":
        assert decode.lookup(asked, 0) == (0, False), "offered again"
    decode.park(asked, ids, 0)
    decode.turn(step(new={name: ((ids,), len(PROMPT) - 1, 1)}))
    decode.finish(asked, ids, "FINISHED_LENGTH_CAPPED")
    decode.turn()


@pytest.mark.parametrize("seed", range(6))
def test_no_life_of_a_request_trips_an_assertion(seed: int) -> None:
    """1, 2: completions only of what is waited for, each once; 3, 4: offers within the prompt; 5: a plan every step."""
    rng = random.Random(seed)
    extra = {"lease_duration": 1, "verify": seed % 2 == 1}
    prefill, decode = (Strict(Engine(f"{side}-{seed}", extra=extra)) for side in ("prefill", "decode"))
    wanted = 0
    for number in range(12):
        status = rng.choice(["FINISHED_LENGTH_CAPPED"] * 4 + ["FINISHED_ABORTED", "FINISHED_STOPPED"])
        params = prefilled(prefill, f"p{number}", [1, 2, 3, 4], status)
        wanted += params is not None
        if params is not None and rng.random() < 0.3:
            # A client or router that damages them, or takes another's.
            params = dict(params) | rng.choice(
                [
                    {"kvferry": None},
                    {"remote_block_ids": [[1, 2, 3, 999]]},
                    {"remote_port": 1},
                    {"remote_engine_id": "another"},
                    {"remote_num_tokens": len(PROMPT) + 1},
                ]
            )
        decoded(decode, f"d{number}", [5, 6, 7, 8], params, rng)
        if rng.random() < 0.5:
            prefill.turn()
    assert wanted > 4
    for side in (decode, prefill):
        side.turn_until(lambda side=side: not (side.parked or side.held))
        # Nothing comes late.
        for _ in range(20):
            side.turn()
        side.engine.end()


@pytest.mark.parametrize("connector", ["KvferryConnector", "KvferryStorageConnector"])
def test_figures_have_prometheus_metrics(connector: str) -> None:
    """5: under MultiConnector, a child's figures without metrics end the API server's output handler."""
    prometheus = pytest.importorskip("prometheus_client")
    types = {kind: kind for kind in (prometheus.Gauge, prometheus.Counter, prometheus.Histogram)}
    config = SimpleNamespace(kv_transfer_config=None)
    metrics = KvferryPromMetrics(connector, config, types, ["model_name", "engine"], {0: ["m", "0"]})
    # Also nothing, and what another version counts.
    metrics.observe(KvferryStats().data, 0)
    metrics.observe({"counters": {"kvferry_of_a_later_version_total": 1}, "others": {}}, 0)
