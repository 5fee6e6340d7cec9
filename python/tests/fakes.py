"""vLLM's objects as far as the adapters look at them, over memory of our own."""

from __future__ import annotations

import ctypes
import mmap
from types import SimpleNamespace
from typing import Any


class Storage:
    """Memory that a tensor's storage would be."""

    def __init__(self, size: int, shift: int = 0) -> None:
        # As with torch, it need not begin at a page.
        self._map = mmap.mmap(-1, size + shift)
        self._shift = shift
        self.size = size
        self._export = ctypes.c_char.from_buffer(self._map, shift)

    def data_ptr(self) -> int:
        return ctypes.addressof(self._export)

    def nbytes(self) -> int:
        return self.size

    def read(self, at: int, size: int) -> bytes:
        return self._map[self._shift + at : self._shift + at + size]

    def write(self, at: int, data: bytes) -> None:
        self._map[self._shift + at : self._shift + at + len(data)] = data


class Tensor:
    """A view of a storage; offset and strides in elements, as torch has them."""

    def __init__(
        self,
        storage: Storage,
        shape: list[int],
        stride: list[int],
        offset: int = 0,
        item: int = 4,
        device: str = "cpu",
    ) -> None:
        self._storage, self.shape, self._stride = storage, shape, stride
        self._offset, self._item = offset, item
        self.device = SimpleNamespace(type=device, index=None)

    def untyped_storage(self) -> Storage:
        return self._storage

    def storage_offset(self) -> int:
        return self._offset

    def stride(self) -> list[int]:
        return self._stride

    def element_size(self) -> int:
        return self._item


def cache_config(groups: list[dict[str, Any]], blocks: int) -> Any:
    return SimpleNamespace(
        num_blocks=blocks,
        kv_cache_layout="LBHNC",
        transfer_group_ids=tuple(range(len(groups))),
        kv_cache_groups=[
            SimpleNamespace(
                layer_names=group["layer_names"],
                kv_cache_spec=SimpleNamespace(block_size=group["block_size"]),
            )
            for group in groups
        ],
    )


def vllm_config(engine_id: str, role: str = "kv_both", tp: int = 1, pp: int = 1, **extra: Any) -> Any:
    return SimpleNamespace(
        kv_transfer_config=SimpleNamespace(
            engine_id=engine_id,
            kv_role=role,
            kv_buffer_device="cpu",
            kv_connector_extra_config={"devices": "lo", **extra},
        ),
        parallel_config=SimpleNamespace(tensor_parallel_size=tp, pipeline_parallel_size=pp),
        model_config=SimpleNamespace(model="tiny", revision=None, dtype="torch.float32"),
        cache_config=SimpleNamespace(cache_dtype="auto"),
    )


def request(name: str, prompt: list[int], params: dict[str, Any] | None = None, **more: Any) -> Any:
    fields = {
        "request_id": name,
        "prompt_token_ids": prompt,
        "all_token_ids": prompt,
        "num_prompt_tokens": len(prompt),
        "num_tokens": len(prompt),
        "num_computed_tokens": 0,
        "num_in_flight_tokens": 0,
        "status": SimpleNamespace(name="WAITING"),
        "kv_transfer_params": params,
    }
    return SimpleNamespace(**{**fields, **more})


def blocks(*groups: list[int]) -> Any:
    return SimpleNamespace(get_block_ids=lambda: groups)


def step(new: dict[str, tuple[list[list[int]], int, int]] | None = None, preempted: list[str] | None = None) -> Any:
    """A step of new requests: block ids, tokens computed before, tokens of the step."""
    new = new or {}
    return SimpleNamespace(
        num_scheduled_tokens={name: tokens for name, (_, _, tokens) in new.items()},
        preempted_req_ids=set(preempted or ()),
        scheduled_new_reqs=[
            SimpleNamespace(req_id=name, block_ids=ids, num_computed_tokens=computed)
            for name, (ids, computed, _) in new.items()
        ],
        scheduled_cached_reqs=SimpleNamespace(
            req_ids=[], resumed_req_ids=set(), new_block_ids=[], num_computed_tokens=[]
        ),
    )
