"""End-to-end suite of the vLLM plugin: real vLLM servers, prefill and decode. Started by `scripts/vllm-e2e`."""
