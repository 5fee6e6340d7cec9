"""What a real vLLM 0.32 asked of `KvferryConnector`, asked again without vLLM: same answers, and the bytes move.

The fixtures are what `record.py` recorded: a prefill and a decode engine, block by block. What differs from life to
life (ports, instances, when exactly a load has ended) is taken from this life.
"""

from __future__ import annotations

import json
import random
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from fakes import Storage, Tensor, blocks, cache_config, vllm_config
from kvferry.vllm import _setup
from kvferry.vllm._messages import Handshake, Plan, Reports
from kvferry.vllm._scheduler import SchedulerSide
from kvferry.vllm._worker import WorkerSide

FIXTURES = Path(__file__).parent / "fixtures"
# How long what a recorded step brought may take.
PATIENCE = 20.0


class Player:
    """One engine: both sides of its connector, and where its recording is."""

    def __init__(self, name: str, **extra: Any) -> None:
        self.calls = json.loads((FIXTURES / f"{name}.json").read_text())
        register = next(call["with"] for call in self.calls if call["hook"] == "register_kv_caches")
        self.name, self.at = name, 0
        self.storages: dict[int, Storage] = {}
        config = cache_config(register["groups"], register["blocks"])
        setup = _setup.of("KvferryConnector", vllm_config(name, **extra), config)
        self.worker = WorkerSide(setup, 0, config, "cpu")
        self.worker.register({layer: self._tensor(of) for layer, of in register["caches"].items()})
        self.scheduler = SchedulerSide(setup)
        description = self.worker.describe()
        assert description is not None
        self.scheduler.publish({(0, 0): Handshake(description, setup.digest)})
        # Offers of this life, in the order in which they were made.
        self.offers: list[dict[str, Any]] = []
        # What has ended and the recording has not come to yet.
        self.early: dict[str, set[str]] = {"sent": set(), "received": set(), "failed": set()}
        self.plan = Plan(b"")
        self.reports: list[tuple[int, bytes]] = []

    def _tensor(self, of: dict[str, Any]) -> Tensor:
        key = of["storage"]
        if key not in self.storages:
            self.storages[key] = Storage(of["storage_bytes"], shift=key % 4096)
        return Tensor(self.storages[key], of["shape"], of["stride"], of["offset"], of["item_bytes"])

    def block(self, number: int) -> bytes:
        """The bytes of a block, of all layers."""
        register = next(call["with"] for call in self.calls if call["hook"] == "register_kv_caches")
        whole = b""
        for of in register["caches"].values():
            size = of["stride"][0] * of["item_bytes"]
            start = of["offset"] * of["item_bytes"] + number * size
            whole += self.storages[of["storage"]].read(start, size)
        return whole

    def fill(self, seed: int) -> None:
        for storage in self.storages.values():
            storage.write(0, random.Random(seed).randbytes(storage.size))

    def finished(self) -> bool:
        return self.at == len(self.calls)

    def one(self, offers: dict[str, dict[str, Any]]) -> dict[str, Any]:
        """Plays the next call; `offers` are those of this life for the recorded ones."""
        call = self.calls[self.at]
        self.at += 1
        play = getattr(self, "play_" + call["hook"], None)
        if play is not None:
            play(call["with"], call["answer"], offers)
        return call

    def request(self, fields: dict[str, Any], offers: dict[str, dict[str, Any]]) -> Any:
        params = fields["kv_transfer_params"]
        if params and "kvferry" in params:
            params = offers[json.dumps(params["kvferry"], sort_keys=True)]
        status = SimpleNamespace(name=fields["status"])
        return SimpleNamespace(**{**fields, "kv_transfer_params": params, "status": status})

    def play_on_new_request(self, given: Any, answer: Any, offers: Any) -> None:
        self.scheduler.new_request(self.request(given["request"], offers))

    def play_get_num_new_matched_tokens(self, given: Any, answer: Any, offers: Any) -> None:
        request = self.request(given["request"], offers)
        # A lookup changes nothing: asked twice, it says the same.
        for _ in range(2):
            said = self.scheduler.matched_tokens(request, given["computed"])
            assert list(said) == answer, request.request_id

    def play_update_state_after_alloc(self, given: Any, answer: Any, offers: Any) -> None:
        request = self.request(given["request"], offers)
        self.scheduler.after_alloc(request, blocks(*given["blocks"]), given["external"])

    def play_build_connector_meta(self, given: Any, answer: Any, offers: Any) -> None:
        output = given["output"]
        new = [SimpleNamespace(**one) for one in output["scheduled_new_reqs"]]
        cached = SimpleNamespace(**output["scheduled_cached_reqs"])
        seen = SimpleNamespace(**{**output, "scheduled_new_reqs": new, "scheduled_cached_reqs": cached})
        self.plan = Plan(self.scheduler.build_step(seen))

    def play_handle_preemptions(self, given: Any, answer: Any, offers: Any) -> None:
        self.worker.release(self.plan.plan)

    def play_bind_connector_metadata(self, given: Any, answer: Any, offers: Any) -> None:
        self.worker.begin(self.plan.plan)

    def play_wait_for_save(self, given: Any, answer: Any, offers: Any) -> None:
        self.worker.end()

    def play_get_transfer_results(self, given: Any, answer: Any, offers: Any) -> None:
        deadline = time.monotonic() + PATIENCE
        while True:
            results = self.worker.results()
            for kind, ids in (("sent", results.sent), ("received", results.received), ("failed", results.failed)):
                self.early[kind] |= ids
            if results.report is not None:
                self.reports.append((0, results.report))
            if all(set(ids) <= self.early[kind] for kind, ids in answer.items()):
                break
            assert time.monotonic() < deadline, f"{self.name}: {answer} did not come, {self.early} did"
            time.sleep(0.001)
        for kind, ids in answer.items():
            self.early[kind] -= set(ids)

    def play_update_connector_output(self, given: Any, answer: Any, offers: Any) -> None:
        meta = Reports(tuple(self.reports)) if self.reports else None
        self.reports = []
        self.scheduler.on_output(SimpleNamespace(kv_connector_worker_meta=meta))

    def play_request_finished_all_groups(self, given: Any, answer: Any, offers: Any) -> None:
        hold, params = self.scheduler.finished(self.request(given["request"], offers), given["blocks"])
        assert hold == answer[0]
        if answer[1] is None:
            assert params is None
            return
        assert params is not None
        # The last one is vLLM's, added afterwards.
        changing = ("kvferry", "remote_port", "remote_prefill_cached_tokens")
        fixed = {key: value for key, value in params.items() if key not in changing}
        assert fixed == {key: value for key, value in answer[1].items() if key not in changing}
        assert params["kvferry"]["epoch"] == answer[1]["kvferry"]["epoch"]
        offers[json.dumps(answer[1]["kvferry"], sort_keys=True)] = params
        self.offers.append(params)

    def end(self) -> None:
        self.worker.shutdown()
        self.scheduler.shutdown()


@pytest.mark.parametrize("lane", ["attached", "served"])
def test_the_recorded_hooks_get_the_recorded_answers_and_the_bytes(lane: str) -> None:
    prefill, decode = Player("prefill", lane=lane), Player("decode", lane=lane)
    prefill.fill(1)
    decode.fill(2)
    offers: dict[str, dict[str, Any]] = {}
    loads = 0
    while not (prefill.finished() and decode.finished()):
        # The decode engine gets on until it needs an offer that is not made yet.
        while not decode.finished():
            params = decode.calls[decode.at]["with"].get("request", {}).get("kv_transfer_params")
            if params and json.dumps(params["kvferry"], sort_keys=True) not in offers:
                break
            call = decode.one(offers)
            if call["hook"] == "update_state_after_alloc" and call["with"]["external"]:
                request, ours = call["with"]["request"], call["with"]["blocks"][0]
            if call["hook"] == "get_transfer_results" and call["answer"]["received"]:
                theirs = request["kv_transfer_params"]["remote_block_ids"][0]
                if not call["answer"]["failed"]:
                    loads += 1
                    for here, there in zip(ours, theirs, strict=False):
                        assert decode.block(here) == prefill.block(there), (here, there)
        if not prefill.finished():
            prefill.one(offers)
    assert loads == 3
    assert len(prefill.offers) == 3
    # Nothing more than was recorded.
    for player in (prefill, decode):
        assert not any(player.early.values()), player.early
    counters, _, _ = decode.scheduler.half.figures()
    assert counters["kvferry_loads_total"] == 6
    assert counters["kvferry_loads_succeeded_total"] == 3
    assert sum(n for key, n in counters.items() if key.startswith("kvferry_loads_failed_total{")) == 3
    counters, gauges, _ = prefill.scheduler.half.figures()
    assert counters["kvferry_lease_parts_total{released}"] == 3
    assert "kvferry_lease_parts_total{expired}" not in counters
    assert gauges.get("kvferry_leases_held", 0) == 0
    decode.end()
    prefill.end()
