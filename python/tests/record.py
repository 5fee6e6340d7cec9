"""Runs a prefill and a decode engine of a real vLLM and records the hooks of their connectors: see `recorder.py`.

python record.py MODEL_FOLDER FIXTURE_FOLDER
"""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
from pathlib import Path
from typing import Any

ENVIRONMENT = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_HOST_IP": "127.0.0.1",
    "VLLM_LOGGING_LEVEL": "ERROR",
    "VLLM_NO_USAGE_STATS": "1",
    "HF_HUB_OFFLINE": "1",
    "OMP_NUM_THREADS": "1",
    "UCX_NET_DEVICES": "lo",
}


def engine(name: str, model: str) -> None:
    """An engine that does as it is told, line by line."""
    import recorder
    from vllm import LLM, SamplingParams
    from vllm.config import KVTransferConfig

    llm = LLM(
        model,
        skip_tokenizer_init=True,
        max_model_len=512,
        block_size=32,
        num_gpu_blocks_override=40,
        enforce_eager=True,
        dtype="float32",
        kv_transfer_config=KVTransferConfig(
            kv_connector="RecordingConnector",
            kv_connector_module_path="recorder",
            kv_role="kv_both",
            engine_id=name,
            kv_load_failure_policy="recompute",
        ),
    )
    print("> ready", flush=True)
    for line in sys.stdin:
        asked = json.loads(line)
        sampling = SamplingParams(
            temperature=0,
            max_tokens=asked["tokens"],
            ignore_eos=True,
            detokenize=False,
            extra_args={"kv_transfer_params": asked["params"]} if asked["params"] else None,
        )
        prompt = {"prompt_token_ids": asked["prompt"]}
        (answer,) = llm.generate([prompt], sampling, use_tqdm=False)
        said = {"tokens": list(answer.outputs[0].token_ids), "params": answer.kv_transfer_params}
        print("> " + json.dumps(said), flush=True)
    recorder.save(name)


class Engine:
    def __init__(self, name: str, model: str, folder: str) -> None:
        environment = {**os.environ, **ENVIRONMENT, "KVFERRY_RECORD_TO": folder}
        self.process = subprocess.Popen(
            [sys.executable, "-W", "ignore", __file__, "--engine", name, model],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=environment,
            cwd=Path(__file__).parent,
        )

    def hear(self) -> str:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            if line.startswith("> "):
                return line[2:].strip()
        raise SystemExit("an engine has ended")

    def ask(self, prompt: list[int], tokens: int, params: Any) -> Any:
        assert self.process.stdin is not None
        asked = {"prompt": prompt, "tokens": tokens, "params": params}
        self.process.stdin.write(json.dumps(asked) + "\n")
        self.process.stdin.flush()
        return json.loads(self.hear())

    def end(self) -> None:
        assert self.process.stdin is not None
        self.process.stdin.close()
        if self.process.wait(60) != 0:
            raise SystemExit("an engine has failed")


def main(model: str, folder: str) -> None:
    prefill, decode = Engine("prefill", model, folder), Engine("decode", model, folder)
    for each in (prefill, decode):
        each.hear()
    for length in (5, 33, 100):
        rng = random.Random(length)
        prompt = [rng.randrange(500) for _ in range(length)]
        offer = prefill.ask(prompt, 1, {"do_remote_decode": True})["params"]
        loaded = decode.ask(prompt, 4, offer)["tokens"]
        # A lease that has ended: the load fails, and the request is computed.
        again = decode.ask(prompt[::-1], 4, offer)["tokens"]
        alone = prefill.ask(prompt, 4, None)["tokens"]
        if loaded != alone or len(again) != 4:
            raise SystemExit(f"wrong tokens for {length}: {loaded}, {alone}")
    prefill.end()
    decode.end()


if __name__ == "__main__":
    if sys.argv[1] == "--engine":
        engine(sys.argv[2], sys.argv[3])
    else:
        main(sys.argv[1], str(Path(sys.argv[2]).resolve()))
