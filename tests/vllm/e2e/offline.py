"""An offline vLLM engine that answers lines of JSON: the other side of `scenarios/in_process.py`.

Run as a program: `python offline.py MODEL KV_TRANSFER_CONFIG`.
"""

from __future__ import annotations

import json
import os
import sys


def main() -> None:
    # vLLM and its libraries write to standard output; answers go to what it was at the start.
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    from vllm import LLM, SamplingParams
    from vllm.config import KVTransferConfig

    engine = LLM(
        model=sys.argv[1],
        dtype="float32",
        enforce_eager=True,
        seed=0,
        block_size=32,
        max_model_len=2048,
        disable_log_stats=False,
        kv_transfer_config=KVTransferConfig(**json.loads(sys.argv[2])),
    )

    def metric(name: str) -> float:
        return sum(found.value for found in engine.get_metrics() if found.name == name)

    for line in sys.stdin:
        question = json.loads(line)
        outputs = []
        if question["prompts"]:
            sampling = [
                SamplingParams(
                    temperature=0,
                    max_tokens=question["max_tokens"],
                    ignore_eos=True,
                    logprobs=1,
                    extra_args={"kv_transfer_params": params} if params else None,
                )
                for params in question["params"]
            ]
            prompts = [{"prompt_token_ids": tokens} for tokens in question["prompts"]]
            for output in engine.generate(prompts, sampling, use_tqdm=False):
                made = output.outputs[0]
                chosen = [each[token].logprob for each, token in zip(made.logprobs, made.token_ids)]
                outputs.append(
                    {"tokens": list(made.token_ids), "logprobs": chosen, "params": output.kv_transfer_params}
                )
        external = metric("vllm:external_prefix_cache_hits")
        answer = {"outputs": outputs, "external": external, "held": metric("kvferry_leases_held")}
        answers.write(json.dumps(answer) + "\n")
        answers.flush()


if __name__ == "__main__":
    main()
