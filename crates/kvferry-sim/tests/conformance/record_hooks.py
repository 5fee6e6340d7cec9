"""Plays the scripts of `scenarios/` on a real vLLM and records the hook calls of its connector.

Run by `scripts/record-hooks`. Each scenario has a process and an engine of its own, in which the
engine core is stepped by hand: nothing depends on time. `--check` compares with what is recorded.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import traceback
from pathlib import Path

HERE = Path(__file__).parent
SCENARIOS = HERE / "scenarios"
VOCABULARY = 512
BLOCK_TOKENS = 32

os.environ.update(
    VLLM_ENABLE_V1_MULTIPROCESSING="0",
    VLLM_CPU_KVCACHE_SPACE="1",
    VLLM_CPU_OMP_THREADS_BIND="nobind",
    VLLM_HOST_IP="127.0.0.1",
    VLLM_LOGGING_LEVEL=os.environ.get("VLLM_LOGGING_LEVEL", "ERROR"),
    VLLM_NO_USAGE_STATS="1",
    HF_HUB_OFFLINE="1",
    OMP_NUM_THREADS="1",
)


def make_model(folder: Path) -> None:
    """A Llama with random weights: nobody looks at its words."""
    if (folder / "config.json").exists():
        return
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=128,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=4,
        max_position_embeddings=1024,
    )
    LlamaForCausalLM(config).save_pretrained(folder)


def engine_config(model: Path, options: dict):
    from vllm.config import KVTransferConfig
    from vllm.engine.arg_utils import EngineArgs

    transfer = KVTransferConfig(
        kv_connector="RecordingConnector",
        kv_connector_module_path="recording_connector",
        kv_role="kv_both",
        kv_load_failure_policy=options.get("failure_policy", "fail"),
    )
    arguments = EngineArgs(
        model=str(model),
        skip_tokenizer_init=True,
        dtype="float32",
        enforce_eager=True,
        seed=0,
        block_size=BLOCK_TOKENS,
        # No more than fits: vLLM refuses to start otherwise.
        max_model_len=min(1024, (options["blocks"] - 1) * BLOCK_TOKENS),
        num_gpu_blocks_override=options["blocks"],
        max_num_seqs=options["max_running"],
        max_num_batched_tokens=options["token_budget"],
        kv_transfer_config=transfer,
    )
    return arguments.create_engine_config()


def prompt(request: dict) -> list[int]:
    """The same tokens for the same seed: `Script::prompt` in `script.rs` makes the same."""
    return [1 + (request.get("seed", 0) * 37 + place * 7) % 500 for place in range(request["prompt"])]


def new_request(core, request: dict):
    from vllm import SamplingParams
    from vllm.v1.engine import EngineCoreRequest

    rejected = request.get("reject", False)
    sampling = SamplingParams(
        temperature=0,
        max_tokens=request["max_tokens"],
        ignore_eos=True,
        detokenize=False,
        prompt_logprobs=1 if request.get("zeroed") else None,
    )
    made = EngineCoreRequest(
        request_id=request["id"],
        # As AsyncLLM.notify_kv_transfer_request_rejected makes it.
        prompt_token_ids=[0] if rejected else prompt(request),
        mm_features=None,
        sampling_params=sampling,
        pooling_params=None,
        arrival_time=0.0,
        lora_request=None,
        cache_salt=None,
        data_parallel_rank=None,
        abort_immediately=rejected,
    )
    return core.preprocess_add_request(made)


def play(model: Path, script: dict) -> dict:
    """Plays a script: the calls, and what they were recorded from."""
    import torch
    import vllm
    from vllm.v1.engine.core import EngineCore
    from vllm.v1.executor.abstract import Executor

    from recording_connector import PLAY

    PLAY.requests = {request["id"]: request for request in script["requests"]}
    config = engine_config(model, script["options"])
    core = EngineCore(config, Executor.get_class(config), log_stats=False)
    for step in range(1, script["steps"] + 1):
        PLAY.step = step
        PLAY.record("step", number=step)
        for request in script["requests"]:
            if request["add"] == step:
                core.add_request(*new_request(core, request))
        for request in script["requests"]:
            if request.get("abort") == step:
                core.abort_requests([request["id"]])
            if request.get("abort_in") == step:
                # As from a client's message: handled when the step has computed.
                core.aborts_queue.put_nowait([request["id"]])
        if not core.scheduler.has_requests():
            PLAY.record("asleep")
            continue
        core.step()
    if core.scheduler.has_requests():
        raise ValueError(f"{script['steps']} steps are too few: requests are left")
    scheduler = config.scheduler_config
    return {
        "vllm": vllm.__version__,
        "torch": torch.__version__,
        "block_size": config.cache_config.block_size,
        "num_gpu_blocks": config.cache_config.num_gpu_blocks,
        "max_num_seqs": scheduler.max_num_seqs,
        "max_num_batched_tokens": scheduler.max_num_batched_tokens,
        "async_scheduling": scheduler.async_scheduling,
        "scheduler_reserve_full_isl": scheduler.scheduler_reserve_full_isl,
        "watermark": scheduler.watermark,
        "prefix_caching": config.cache_config.enable_prefix_caching,
        "model_runner": 2 if config.use_v2_model_runner else 1,
        "kv_load_failure_policy": config.kv_transfer_config.kv_load_failure_policy,
        "calls": PLAY.calls,
    }


def text(script: dict) -> str:
    """A line per request and per call, so that changes can be read."""

    def rows(indent: int, items: list) -> str:
        return ",\n".join(" " * indent + json.dumps(item) for item in items)

    recorded = {key: value for key, value in script["recorded"].items() if key != "calls"}
    settings = "".join(f"    {json.dumps(key)}: {json.dumps(value)},\n" for key, value in recorded.items())
    return (
        "{\n"
        f'  "about": {json.dumps(script["about"])},\n'
        f'  "options": {json.dumps(script["options"])},\n'
        f'  "requests": [\n{rows(4, script["requests"])}\n  ],\n'
        f'  "steps": {script["steps"]},\n'
        f'  "recorded": {{\n{settings}    "calls": [\n{rows(6, script["recorded"]["calls"])}\n    ]\n  }}\n'
        "}\n"
    )


def one(model: Path, path: Path, check: bool) -> bool:
    script = json.loads(path.read_text())
    old = script.pop("recorded", None)
    script["recorded"] = play(model, script)
    if not check:
        path.write_text(text(script))
    elif old != script["recorded"]:
        kept = path.with_suffix(".new")
        kept.write_text(text(script))
        print(f"{path.stem}: vLLM does something else than what is recorded; see {kept}", flush=True)
        return False
    print(f"{path.stem}: {len(script['recorded']['calls'])} calls", flush=True)
    return True


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true", help="compare, write nothing")
    parser.add_argument("--model", type=Path, required=True, help="where the model is, or is made")
    parser.add_argument("names", nargs="*", help="scenarios; all by default")
    arguments = parser.parse_args()
    paths = [SCENARIOS / f"{name}.json" for name in arguments.names] or sorted(SCENARIOS.glob("*.json"))
    make_model(arguments.model)
    sys.path.insert(0, str(HERE))
    # What takes long is done once: imports, and vLLM's look at the model.
    import vllm.v1.engine.core  # noqa: F401
    import vllm.v1.worker.cpu_worker  # noqa: F401

    engine_config(arguments.model, {"blocks": 33, "max_running": 4, "token_budget": 128})
    passed = 0
    for path in paths:
        # A process each: vLLM's groups, caches and connector live once per process.
        child = os.fork()
        if child == 0:
            status = 1
            try:
                status = 0 if one(arguments.model, path, arguments.check) else 1
            except BaseException:
                traceback.print_exc()
            finally:
                sys.stdout.flush()
                sys.stderr.flush()
                os._exit(status)
        passed += os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    print(f"{passed} passed, {len(paths) - passed} failed, 0 skipped")
    return 0 if passed == len(paths) else 1


if __name__ == "__main__":
    sys.exit(main())
