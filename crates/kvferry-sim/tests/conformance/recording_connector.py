"""A KV connector for vLLM that does what a script says and records every hook call.

Responsible for the puppet's rules, the same as those of `puppet.rs` beside it, and for calls in the
form of `kvferry_sim::Call`. It moves no bytes: what a load "brings" is what happens to be in the
blocks. Both roles must live in one process, where they share `PLAY`.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorMetadata,
    KVConnectorTransferResults,
    SupportsHMA,
)
from vllm.v1.request import RequestStatus

HOW = {
    RequestStatus.FINISHED_STOPPED: "Stopped",
    RequestStatus.FINISHED_LENGTH_CAPPED: "Length",
    RequestStatus.FINISHED_ABORTED: "Aborted",
    RequestStatus.FINISHED_ERROR: "Failed",
}


@dataclass
class Play:
    """The script, and where the play is."""

    requests: dict[str, dict[str, Any]] = field(default_factory=dict)
    calls: list[dict[str, Any]] = field(default_factory=list)
    # The script's step, from 1.
    step: int = 0
    # Loads that were begun, per request: the next offer is the one with that index.
    loads: dict[str, int] = field(default_factory=dict)
    # The last lookup's `computed`, per request.
    computed: dict[str, int] = field(default_factory=dict)
    # What is to be reported: (step, request, blocks that fail, whether the request fails).
    receiving: list[tuple[int, str, list[int], bool]] = field(default_factory=list)
    # Requests that are held, and that workers know to be finished: (step, request).
    held: set[str] = field(default_factory=set)
    sending: list[tuple[int, str]] = field(default_factory=list)

    def record(self, hook: str, worker: bool = False, **arguments: Any) -> None:
        call: dict[str, Any] = {"engine": "vllm"}
        if worker:
            call["rank"] = 0
        self.calls.append({**call, "hook": hook, "with": arguments})

    def offer(self, request: str) -> dict[str, Any] | None:
        offers = self.requests[request].get("offers", [])
        number = self.loads.get(request, 0)
        return offers[number] if number < len(offers) else None


PLAY = Play()


def answer(offer: dict[str, Any] | None, prompt: int, computed: int) -> tuple[int | None, bool]:
    if offer is None:
        return 0, False
    if PLAY.step < offer.get("later_until", 0):
        return None, False
    sync = offer.get("sync", False)
    tokens = min(offer["upto"], prompt - 1 if sync else prompt) - computed
    return (tokens, not sync) if tokens > 0 else (0, False)


class Metadata(KVConnectorMetadata):
    """Nothing is in it: the worker's role sees the play."""


class RecordingConnector(KVConnectorBase_V1, SupportsHMA):
    # --- The scheduler's half ---

    def on_new_request(self, request):
        PLAY.record("on_new_request", request=request.request_id, prompt=request.num_prompt_tokens)

    def get_num_new_matched_tokens(self, request, num_computed_tokens):
        name = request.request_id
        said = answer(PLAY.offer(name), request.num_prompt_tokens, num_computed_tokens)
        PLAY.computed[name] = num_computed_tokens
        PLAY.record("matched_tokens", request=name, computed=num_computed_tokens, answer=list(said))
        return said

    def update_state_after_alloc(self, request, blocks, num_external_tokens):
        name = request.request_id
        tables = blocks.get_block_ids()
        # vLLM does not say how much it had itself: it is what the lookup was told, and where there
        # was no lookup, because something is loaded, what the request has.
        local = request.num_computed_tokens or PLAY.computed[name]
        PLAY.record(
            "after_alloc",
            request=name,
            blocks=[list(table) for table in tables],
            local=local,
            external=num_external_tokens,
        )
        if num_external_tokens == 0:
            return
        offer = PLAY.offer(name)
        PLAY.loads[name] = PLAY.loads.get(name, 0) + 1
        if not offer.get("sync", False):
            failed = offer.get("failed")
            places = failed if isinstance(failed, list) else []
            due = PLAY.step + offer["takes"]
            PLAY.receiving.append((due, name, [tables[0][place] for place in places], failed == "request"))

    def build_connector_meta(self, scheduler_output):
        preempted = scheduler_output.preempted_req_ids
        if preempted:
            PLAY.record("preempted", requests=sorted(preempted))
        new = {one.req_id: one for one in scheduler_output.scheduled_new_reqs}
        cached = scheduler_output.scheduled_cached_reqs
        scheduled = []
        for name, tokens in scheduler_output.num_scheduled_tokens.items():
            if name in new:
                blocks, computed, renewed = new[name].block_ids, new[name].num_computed_tokens, True
            else:
                place = cached.req_ids.index(name)
                blocks, computed = cached.new_block_ids[place], cached.num_computed_tokens[place]
                renewed = name in cached.resumed_req_ids
            scheduled.append(
                {
                    "request": name,
                    "new_blocks": [list(table) for table in blocks or ([],)],
                    "renewed": renewed,
                    "computed": computed,
                    "tokens": tokens,
                }
            )
        PLAY.record("build_step", scheduled=scheduled)
        return Metadata()

    def update_connector_output(self, connector_output):
        received = sorted(connector_output.finished_recving or ())
        sent = sorted(connector_output.finished_sending or ())
        # vLLM calls this after every step; the contract's `on_report` is for steps that bring something.
        if received or sent:
            PLAY.record("on_report", received=received, sent=sent)

    def request_finished_all_groups(self, request, block_ids):
        name = request.request_id
        hold = PLAY.requests[name].get("hold") is not None
        PLAY.record(
            "request_finished",
            request=name,
            blocks=[list(table) for table in block_ids],
            computed=request.num_computed_tokens,
            in_flight=request.num_in_flight_tokens,
            how=HOW[request.status],
            answer=[hold, None],
        )
        if hold:
            PLAY.held.add(name)
        return hold, None

    def request_finished(self, request, block_ids):
        return self.request_finished_all_groups(request, (block_ids,))

    # --- The worker's half ---

    def register_kv_caches(self, kv_caches):
        PLAY.record("register", worker=True, layers=len(kv_caches))

    def handle_preemptions(self, kv_connector_metadata):
        PLAY.record("release_blocks", worker=True)

    def bind_connector_metadata(self, connector_metadata):
        super().bind_connector_metadata(connector_metadata)
        PLAY.record("begin_step", worker=True)

    def start_load_kv(self, forward_context, **kwargs):
        pass

    def wait_for_layer_load(self, layer_name):
        pass

    def save_kv_layer(self, layer_name, kv_layer, attn_metadata, **kwargs):
        pass

    def wait_for_save(self):
        PLAY.record("end_step", worker=True)

    def get_transfer_results(self, finished_req_ids):
        for name in sorted(finished_req_ids & PLAY.held):
            PLAY.sending.append((PLAY.step + PLAY.requests[name]["hold"], name))
        self.received = [load for load in PLAY.receiving if load[0] <= PLAY.step]
        self.sent = sorted(name for step, name in PLAY.sending if step <= PLAY.step)
        PLAY.receiving = [load for load in PLAY.receiving if load[0] > PLAY.step]
        PLAY.sending = [send for send in PLAY.sending if send[0] > PLAY.step]
        PLAY.held -= set(self.sent)
        return KVConnectorTransferResults(
            finished_sending=set(self.sent),
            finished_recving={name for _, name, _, _ in self.received},
            failed_recving={name for _, name, _, failed in self.received if failed},
        )

    def get_block_ids_with_load_errors(self):
        # Called right after `get_transfer_results`: the two are one report.
        received = [
            {
                "request": name,
                "failure": "Peer" if failed or blocks else None,
                "failed": [{"group": 0, "block": block} for block in blocks],
            }
            for _, name, blocks, failed in self.received
        ]
        PLAY.record("take_report", worker=True, answer={"received": received, "sent": self.sent})
        return {block for _, _, blocks, _ in self.received for block in blocks}
