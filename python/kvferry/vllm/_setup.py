"""What the halves are told of an engine, out of vLLM's configuration."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

from kvferry import _native, _ucx
from kvferry._native import ConfigurationError


@dataclass(frozen=True)
class Setup:
    """An engine, as both halves of its connector see it."""

    connector: str
    engine_id: str
    role: str
    tensor_parallel: int
    pipeline_parallel: int
    # Cache groups that take part, by their number in vLLM; all, but for models that keep some to themselves.
    groups: tuple[int, ...]
    all_groups: bool
    text: str

    @property
    def ranks(self) -> int:
        return self.tensor_parallel * self.pipeline_parallel

    def rank(self, pp: int, tp: int) -> int:
        return pp * self.tensor_parallel + tp

    def select(self, blocks: Any) -> Any:
        """The block ids of the groups that take part."""
        return blocks if self.all_groups else tuple(blocks[group] for group in self.groups)


def of(connector: str, vllm_config: Any, kv_cache_config: Any) -> Setup:
    """Reads and checks a configuration.

    Raises:
        ConfigurationError: what kvferry cannot do with this engine, or what is wrong with a setting.
    """
    transfer = vllm_config.kv_transfer_config
    extra = dict(transfer.kv_connector_extra_config or {})
    try:
        extra_text = json.dumps(extra, allow_nan=False)
    except (TypeError, ValueError) as error:
        raise ConfigurationError(f"kv_connector_extra_config is no JSON: {error}") from error
    _native.check_settings(connector, extra_text)
    if kv_cache_config is None:
        raise ConfigurationError(
            f"{connector} needs the cache's configuration, which this vLLM does not hand to connectors; it is tested "
            "with vLLM 0.32"
        )
    parallel = vllm_config.parallel_config
    for name in ("prefill_context_parallel_size", "decode_context_parallel_size"):
        if (size := getattr(parallel, name, 1)) > 1:
            raise ConfigurationError(f"{connector} does not support {name}={size}: set it to 1")
    everything = range(len(kv_cache_config.kv_cache_groups))
    groups = tuple(getattr(kv_cache_config, "transfer_group_ids", everything))
    specs = [kv_cache_config.kv_cache_groups[group].kv_cache_spec for group in groups]
    tensor_parallel = parallel.tensor_parallel_size
    pipeline_parallel = parallel.pipeline_parallel_size
    model, layout = _model(vllm_config), _layout(vllm_config, kv_cache_config)
    setup = {
        "connector": connector,
        "engine_id": transfer.engine_id,
        "role": transfer.kv_role,
        "ranks": tensor_parallel * pipeline_parallel,
        "block_tokens": [spec.block_size for spec in specs],
        "model": model,
        "layout": layout,
        "compatibility": {
            "model": model,
            "cache dtype and layout": layout,
            "tensor parallel size": str(tensor_parallel),
            "pipeline parallel size": str(pipeline_parallel),
        },
        "extra": extra,
        "ucx_library": None if connector != "KvferryConnector" else _ucx.library(_native.ucx_choice(extra_text)),
    }
    return Setup(
        connector=connector,
        engine_id=transfer.engine_id,
        role=transfer.kv_role,
        tensor_parallel=tensor_parallel,
        pipeline_parallel=pipeline_parallel,
        groups=groups,
        all_groups=len(groups) == len(everything),
        text=json.dumps(setup),
    )


def _model(vllm_config: Any) -> str:
    model = vllm_config.model_config
    revision = getattr(model, "revision", None)
    return f"{model.model}@{revision}" if revision else str(model.model)


def _layout(vllm_config: Any, kv_cache_config: Any) -> str:
    """What must be equal for bytes of a block to mean the same, as one text."""
    model, cache = vllm_config.model_config, vllm_config.cache_config
    dtype = str(cache.cache_dtype)
    if dtype == "auto":
        dtype = str(model.dtype).removeprefix("torch.")
    name = getattr(kv_cache_config, "kv_cache_layout", None) or "default layout"
    specs = [group.kv_cache_spec for group in kv_cache_config.kv_cache_groups]
    kinds = "+".join(dict.fromkeys(type(spec).__name__ for spec in specs))
    return f"{dtype}, {name}, {kinds}"
