"""What the halves are told of an engine, out of vLLM's configuration."""

from __future__ import annotations

import hashlib
import json
import logging
import os
from dataclasses import dataclass
from typing import Any

from kvferry import _native, _ucx
from kvferry._native import ConfigurationError

logger = logging.getLogger("vllm.kvferry")


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
    # Whether blocks are saved to a directory.
    has_directory: bool
    # Of all settings that this process has: every process of an engine must have the same.
    digest: str
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
    chosen, has_directory, ucx = _native.read_settings(connector, extra_text)
    logger.info("%s: settings: %s", connector, ", ".join(chosen) or "all defaults")
    for name, meant in _native.misspelt_variables(list(os.environ)):
        logger.warning("%s: the environment variable %s is no setting; did you mean %s?", connector, name, meant)
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
    transferred = tuple(getattr(kv_cache_config, "transfer_group_ids", everything))
    cacheable = tuple(getattr(kv_cache_config, "prefix_cacheable_group_ids", transferred))
    environment = {name: value for name, value in os.environ.items() if name.startswith("KVFERRY_")}
    groups = transferred if connector == "KvferryConnector" else cacheable
    if has_directory and groups != cacheable:
        raise ConfigurationError(
            f"shared_storage_path: this model has cache groups that are no use to others by their tokens ({groups}, of "
            f"which {cacheable} are); leave it out"
        )
    specs = [kv_cache_config.kv_cache_groups[group].kv_cache_spec for group in groups]
    for spec in specs:
        # The state after a whole prompt is no use for computing its last token.
        if "Mamba" in (kind := _kind(spec)):
            raise ConfigurationError(
                f"{connector} does not support recurrent state ({kind}): a model with such layers would go on from a "
                "state that has seen the last token already"
            )
    tensor_parallel = parallel.tensor_parallel_size
    pipeline_parallel = parallel.pipeline_parallel_size
    model, layout = _model(vllm_config), _layout(vllm_config, kv_cache_config, specs)
    sizes = f"tp{tensor_parallel} pp{pipeline_parallel}"
    setup = {
        "connector": connector,
        "engine_id": transfer.engine_id,
        "role": transfer.kv_role,
        "ranks": tensor_parallel * pipeline_parallel,
        "block_tokens": [spec.block_size for spec in specs],
        "reach": [_reach(spec) for spec in specs],
        "model": model,
        # Ranks of other shapes hold other parts under the same number.
        "layout": f"{layout}, {sizes}",
        "compatibility": {
            "model": model,
            "cache dtype and layout": layout,
            "tensor parallel size": str(tensor_parallel),
            "pipeline parallel size": str(pipeline_parallel),
        },
        "extra": extra,
        "port_offset": getattr(parallel, "data_parallel_index", 0) or 0,
        "ucx_library": None if connector != "KvferryConnector" else _ucx.library(ucx),
    }
    return Setup(
        connector=connector,
        engine_id=transfer.engine_id,
        role=transfer.kv_role,
        tensor_parallel=tensor_parallel,
        pipeline_parallel=pipeline_parallel,
        groups=groups,
        all_groups=len(groups) == len(everything),
        has_directory=has_directory,
        digest=hashlib.sha256(json.dumps([extra, environment], sort_keys=True).encode()).hexdigest(),
        text=json.dumps(setup),
    )


def _model(vllm_config: Any) -> str:
    model = vllm_config.model_config
    revision = getattr(model, "revision", None)
    return f"{model.model}@{revision}" if revision else str(model.model)


def _first(spec: Any) -> Any:
    """A group's spec, or its first member's: the scheduler sees a member where workers see the group."""
    members = getattr(spec, "kv_cache_specs", None)
    return next(iter(members.values())) if members else spec


def _kind(spec: Any) -> str:
    """The type of a group's cache."""
    return type(_first(spec)).__name__


def _reach(spec: Any) -> Any:
    """How far back a group's attention reaches, where vLLM drops what is behind that: other types keep all."""
    kind, one = _kind(spec), _first(spec)
    if kind.startswith("SlidingWindow"):
        return {"window": one.sliding_window}
    if kind.startswith("ChunkedLocal"):
        return {"chunk": one.attention_chunk_size}
    return "all"


def _packing() -> str:
    """How the processor's attention packs a block, where it is a processor's: machines differ."""
    try:
        import torch
        from vllm.platforms import current_platform
    except ImportError:
        return ""
    if not current_platform.is_cpu():
        return ""
    return ", amx" if torch.cpu._is_amx_tile_supported() else f", {torch.backends.cpu.get_cpu_capability()}"


def _layout(vllm_config: Any, kv_cache_config: Any, specs: list[Any]) -> str:
    """What must be equal for bytes of a block to mean the same, as one text."""
    model, cache = vllm_config.model_config, vllm_config.cache_config
    dtype = str(cache.cache_dtype)
    if dtype == "auto":
        dtype = str(model.dtype).removeprefix("torch.")
    name = getattr(kv_cache_config, "kv_cache_layout", None) or "default layout"
    kinds = "+".join(dict.fromkeys(_kind(spec) for spec in specs))
    return f"{dtype}, {name}, {kinds}{_packing()}"
