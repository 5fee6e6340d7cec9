"""Records which hooks of `KvferryConnector` a real vLLM calls, with what, and what they answer.

`python record.py` (in an environment with vLLM and kvferry) runs a prefill and a decode engine with it and writes
`fixtures/`. `test_replay.py` plays what was recorded to the adapters, without vLLM.
"""

from __future__ import annotations

import json
import os
from typing import Any

from kvferry.vllm._connector import KvferryConnector

CALLS: list[dict[str, Any]] = []


def request_of(request: Any) -> dict[str, Any]:
    return {
        "request_id": request.request_id,
        "prompt_token_ids": request.prompt_token_ids,
        "all_token_ids": list(request.all_token_ids),
        "num_prompt_tokens": request.num_prompt_tokens,
        "num_tokens": request.num_tokens,
        "num_computed_tokens": request.num_computed_tokens,
        "num_in_flight_tokens": request.num_in_flight_tokens,
        "status": request.status.name,
        "kv_transfer_params": request.kv_transfer_params,
    }


def step_of(output: Any) -> dict[str, Any]:
    cached = output.scheduled_cached_reqs
    return {
        "num_scheduled_tokens": output.num_scheduled_tokens,
        "preempted_req_ids": sorted(output.preempted_req_ids or ()),
        "scheduled_new_reqs": [
            {
                "req_id": new.req_id,
                "block_ids": new.block_ids,
                "num_computed_tokens": new.num_computed_tokens,
            }
            for new in output.scheduled_new_reqs
        ],
        "scheduled_cached_reqs": {
            "req_ids": cached.req_ids,
            "resumed_req_ids": sorted(cached.resumed_req_ids),
            "new_block_ids": cached.new_block_ids,
            "num_computed_tokens": cached.num_computed_tokens,
        },
    }


def tensor_of(tensor: Any) -> dict[str, Any]:
    storage = tensor.untyped_storage()
    return {
        "storage": storage.data_ptr(),
        "storage_bytes": storage.nbytes(),
        "offset": tensor.storage_offset(),
        "shape": list(tensor.shape),
        "stride": list(tensor.stride()),
        "item_bytes": tensor.element_size(),
    }


class RecordingConnector(KvferryConnector):
    """Both roles live in one process here, and record into one list."""

    def _record(self, hook: str, answer: Any = None, **given: Any) -> Any:
        CALLS.append({"hook": hook, "with": given, "answer": answer})
        return answer

    def on_new_request(self, request):
        super().on_new_request(request)
        self._record("on_new_request", request=request_of(request))

    def get_num_new_matched_tokens(self, request, num_computed_tokens):
        answer = super().get_num_new_matched_tokens(request, num_computed_tokens)
        given = {"request": request_of(request), "computed": num_computed_tokens}
        return tuple(self._record("get_num_new_matched_tokens", list(answer), **given))

    def update_state_after_alloc(self, request, blocks, num_external_tokens):
        super().update_state_after_alloc(request, blocks, num_external_tokens)
        self._record(
            "update_state_after_alloc",
            request=request_of(request),
            blocks=blocks.get_block_ids(),
            external=num_external_tokens,
        )

    def build_connector_meta(self, scheduler_output):
        self._record("build_connector_meta", output=step_of(scheduler_output))
        return super().build_connector_meta(scheduler_output)

    def update_connector_output(self, connector_output):
        super().update_connector_output(connector_output)
        self._record("update_connector_output", reports=connector_output.kv_connector_worker_meta is not None)

    def request_finished_all_groups(self, request, block_ids):
        hold, params = super().request_finished_all_groups(request, block_ids)
        self._record("request_finished_all_groups", [hold, params], request=request_of(request), blocks=block_ids)
        return hold, params

    def set_xfer_handshake_metadata_pp_aware(self, metadata):
        super().set_xfer_handshake_metadata_pp_aware(metadata)
        self._record("set_xfer_handshake_metadata_pp_aware", ranks=[list(rank) for rank in metadata])

    def register_kv_caches(self, kv_caches):
        super().register_kv_caches(kv_caches)
        config = self._kv_cache_config
        groups = [
            {"layer_names": group.layer_names, "block_size": group.kv_cache_spec.block_size}
            for group in config.kv_cache_groups
        ]
        caches = {layer: tensor_of(tensor) for layer, tensor in kv_caches.items()}
        self._record("register_kv_caches", caches=caches, groups=groups, blocks=config.num_blocks)

    def handle_preemptions(self, kv_connector_metadata):
        super().handle_preemptions(kv_connector_metadata)
        self._record("handle_preemptions")

    def bind_connector_metadata(self, connector_metadata):
        super().bind_connector_metadata(connector_metadata)
        self._record("bind_connector_metadata")

    def wait_for_save(self):
        super().wait_for_save()
        self._record("wait_for_save")

    def get_transfer_results(self, finished_req_ids):
        results = super().get_transfer_results(finished_req_ids)
        answer = {
            "sent": sorted(results.finished_sending),
            "received": sorted(results.finished_recving),
            "failed": sorted(results.failed_recving),
        }
        self._record("get_transfer_results", answer, finished=sorted(finished_req_ids))
        return results

    def build_connector_worker_meta(self):
        meta = super().build_connector_worker_meta()
        self._record("build_connector_worker_meta", meta is not None)
        return meta


def save(engine: str) -> None:
    folder = os.environ["KVFERRY_RECORD_TO"]
    with open(os.path.join(folder, f"{engine}.json"), "w", encoding="utf-8") as file:
        lines = ",\n".join(json.dumps(call, separators=(",", ":")) for call in CALLS)
        file.write(f"[\n{lines}\n]\n")
