"""The scheduler's side: vLLM's requests and steps as the native half wants them.

Nothing here decides: what is offered, loaded and held is the native half's. Duck-typed, so that it can be tested
without vLLM.
"""

from __future__ import annotations

import json
import logging
from typing import Any

from kvferry._native import ConfigurationError, SchedulerHalf
from kvferry.vllm._messages import Handshake, Reports
from kvferry.vllm._setup import Setup

logger = logging.getLogger("vllm.kvferry")

_HOW = {
    "FINISHED_STOPPED": "stopped",
    "FINISHED_REPETITION": "stopped",
    "FINISHED_LENGTH_CAPPED": "length",
    "FINISHED_ABORTED": "aborted",
}


class SchedulerSide:
    """One engine's scheduler half and what it must remember of vLLM's requests."""

    def __init__(self, setup: Setup) -> None:
        self.setup = setup
        self.half = SchedulerHalf(setup.text)
        self.reads_tokens = self.half.reads_tokens
        # Requests that the half is asked about in steps: those with transfer parameters, or all of a half that
        # reads tokens.
        self._watched: dict[str, Any] = {}
        # How many token ids the half knows, where it wants them.
        self._known: dict[str, int] = {}
        # What the last lookup was told, since vLLM does not repeat it after the allocation.
        self._computed: dict[str, int] = {}
        self.changed = True
        if self.half.address:
            logger.info("%s: directory at %s", setup.connector, self.half.address)

    def publish(self, metadata: dict[tuple[int, int], Any]) -> None:
        """Makes the ranks known to consumers."""
        for (pp, tp), handshake in metadata.items():
            if not isinstance(handshake, Handshake):
                kind = f"{type(handshake).__module__}.{type(handshake).__qualname__}"
                raise ConfigurationError(
                    f"{self.setup.connector} was handed the handshake of another connector ({kind}). vLLM's "
                    "MultiConnector passes the first child's to all: only one child may be a prefill/decode connector; "
                    "remove the other one"
                )
            if handshake.digest != self.setup.digest:
                raise ConfigurationError(
                    f"rank {tp} of stage {pp} has other settings than the scheduler: the variables KVFERRY_... must be "
                    "the same in all processes of an engine (Ray: VLLM_RAY_EXTRA_ENV_VAR_PREFIXES_TO_COPY=KVFERRY_)"
                )
            self.half.publish(self.setup.rank(pp, tp), handshake.description)

    def new_request(self, request: Any) -> None:
        params = request.kv_transfer_params
        if params is None and not self.reads_tokens:
            return
        name = request.request_id
        text = None
        if params is not None:
            try:
                text = json.dumps(params, allow_nan=False)
            except (TypeError, ValueError) as error:
                logger.warning("request %s: kv_transfer_params are no JSON: %s", name, error)
        # Embeddings have no ids: nothing is known of them.
        tokens = (request.prompt_token_ids or ()) if self.reads_tokens else ()
        wrong = self.half.new_request(name, tokens, request.num_prompt_tokens, text, extra_key(request))
        if wrong is not None:
            logger.warning("request %.100s is computed here: %s", name, wrong)
        self._watched[name] = request
        self._known[name] = len(tokens)
        self.changed = True

    def matched_tokens(self, request: Any, computed: int) -> tuple[int | None, bool]:
        name = request.request_id
        if name not in self._watched:
            return 0, False
        self._computed[name] = computed
        return self.half.matched_tokens(name, computed)

    def after_alloc(self, request: Any, blocks: Any, external: int) -> None:
        name = request.request_id
        if name not in self._watched:
            return
        # A request whose load is over has its number; one that was looked up has what the lookup was told.
        local = request.num_computed_tokens or self._computed.get(name, 0)
        self.half.after_alloc(name, self.setup.select(blocks.get_block_ids()), local, external)

    def build_step(self, output: Any) -> bytes:
        preempted = getattr(output, "preempted_req_ids", None) or ()
        watched = self._watched
        if not watched or not (output.num_scheduled_tokens or preempted):
            return self.half.build_step((), ())
        tokens, scheduled, select = output.num_scheduled_tokens, [], self.setup.select
        for new in output.scheduled_new_reqs:
            name = new.req_id
            if name in watched:
                blocks = select(new.block_ids)
                computed = new.num_computed_tokens
                scheduled.append((name, blocks, True, computed, tokens[name], self._news(name)))
        cached = output.scheduled_cached_reqs
        for place, name in enumerate(cached.req_ids):
            if name in watched:
                blocks = cached.new_block_ids[place]
                if blocks is not None:
                    blocks = select(blocks)
                renewed = name in cached.resumed_req_ids
                computed = cached.num_computed_tokens[place]
                scheduled.append((name, blocks, renewed, computed, tokens[name], self._news(name)))
        gone = [name for name in preempted if name in watched]
        return self.half.build_step(gone, scheduled)

    def _news(self, name: str) -> Any:
        """Token ids that became known since the half was told."""
        if not self.reads_tokens:
            return None
        request = self._watched[name]
        if request.prompt_token_ids is None:
            return None
        known, now = self._known[name], request.num_tokens
        if now <= known:
            return None
        self._known[name] = now
        return request.all_token_ids[known:now]

    def finished(self, request: Any, blocks: Any) -> tuple[bool, dict[str, Any] | None]:
        name = request.request_id
        self._computed.pop(name, None)
        if self._watched.pop(name, None) is None:
            return False, None
        self._known.pop(name, None)
        self.changed = True
        hold, text = self.half.request_finished(
            name,
            self.setup.select(blocks),
            request.num_computed_tokens,
            getattr(request, "num_in_flight_tokens", 0),
            _HOW.get(request.status.name, "failed"),
        )
        return hold, json.loads(text) if text is not None else None

    def on_output(self, output: Any) -> None:
        meta = output.kv_connector_worker_meta
        if isinstance(meta, Reports):
            self.half.on_reports(list(meta.reports))
            self.changed = True

    def shutdown(self) -> None:
        self.half.shutdown()


def extra_key(request: Any) -> str:
    """What a request's cache depends on besides its tokens; empty for nothing."""
    parts: list[Any] = []
    if (lora := getattr(request, "lora_request", None)) is not None:
        parts.append(["lora", lora.lora_name, lora.lora_int_id, getattr(lora, "lora_path", "")])
    if salt := getattr(request, "cache_salt", None):
        parts.append(["salt", salt])
    for feature in getattr(request, "mm_features", None) or ():
        parts.append(["media", str(feature.identifier), feature.mm_position.offset])
    return json.dumps(parts) if parts else ""
