"""Makes the models of the suite: small, with random weights, and a tokenizer of 512 words.

Responsible for models whose greedy tokens depend on the whole prompt, so that a block of another prompt,
or a block that never came, shows. Not responsible for prompts or right answers (`reference.py`).

Run as a program in vLLM's environment: `python model.py FOLDER KIND`.
"""

from __future__ import annotations

import sys
from pathlib import Path

VOCABULARY = 512
BLOCK_TOKENS = 32
CONTEXT = 2048
# Changed together with anything below: the folder's name has it.
VERSION = 1
# With the library's usual 0.02 a model repeats its last token, whatever came before. With this, attention is
# uneven enough for every part of a prompt to matter, and even enough for none to matter alone.
SPREAD = 0.12

CHAT_TEMPLATE = "{% for message in messages %}{{ message['content'] }} {% endfor %}"


def _llama():
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=256,
        intermediate_size=256,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=4,
        head_dim=64,
        max_position_embeddings=CONTEXT,
        initializer_range=SPREAD,
    )
    return LlamaForCausalLM(config)


def _sliding():
    """Layers with a window and full ones by turns: two cache groups in vLLM."""
    from transformers import Gemma3ForCausalLM, Gemma3TextConfig

    config = Gemma3TextConfig(
        vocab_size=VOCABULARY,
        hidden_size=256,
        intermediate_size=256,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=4,
        head_dim=64,
        query_pre_attn_scalar=64,
        max_position_embeddings=CONTEXT,
        sliding_window=96,
        layer_types=["sliding_attention", "full_attention"] * 2,
        initializer_range=SPREAD,
        # Or a model with random weights says its last token again.
        tie_word_embeddings=False,
    )
    model = Gemma3ForCausalLM(config)
    # Gemma multiplies these by the root of the hidden size, which would drown the layers.
    model.model.embed_tokens.weight.data /= config.hidden_size**0.5
    return model


KINDS = {"llama": _llama, "sliding": _sliding}


def folder_name(kind: str) -> str:
    return f"e2e-{kind}-{VERSION}"


def _tokenizer():
    """Token n is the word `wn`."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = {f"w{token}": token for token in range(VOCABULARY)}
    inner = Tokenizer(models.WordLevel(words, unk_token="w0"))
    inner.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    made = PreTrainedTokenizerFast(tokenizer_object=inner, unk_token="w0", bos_token="w1", eos_token="w2")
    made.chat_template = CHAT_TEMPLATE
    return made


def make(folder: Path, kind: str) -> None:
    if (folder / "made").exists():
        return
    import torch

    torch.manual_seed(0)
    model = KINDS[kind]()
    model.save_pretrained(folder)
    _tokenizer().save_pretrained(folder)
    (folder / "made").touch()


if __name__ == "__main__":
    make(Path(sys.argv[1]), sys.argv[2])
