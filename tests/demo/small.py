"""A model of two layers over bytes, in the place of the demo's; run as a program, the demo's fresh process with it."""

from __future__ import annotations

import sys
from typing import Any

from kvcache_factory.demo import restart
from kvcache_factory.demo.text import reference_text


def bytes_tokenizer() -> Any:
    """One token for each byte, and a chat template."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = ["<pad>", "<|end|>", *sorted(pre_tokenizers.ByteLevel.alphabet())]
    raw = Tokenizer(models.BPE(vocab={word: i for i, word in enumerate(words)}, merges=[]))
    raw.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    raw.decoder = decoders.ByteLevel()
    made = PreTrainedTokenizerFast(tokenizer_object=raw, pad_token="<pad>", eos_token="<|end|>")
    made.chat_template = (
        "{% for m in messages %}{{ m['role'] }}: {{ m['content'] }}<|end|>{% endfor %}"
        "{% if add_generation_prompt %}assistant: {% endif %}"
    )
    return made


def small_model(*_: object) -> tuple[Any, Any]:
    """The same weights in every process."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    tokenizer = bytes_tokenizer()
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=2048,
        pad_token_id=0,
        eos_token_id=1,
        initializer_range=0.5,
    )
    return LlamaForCausalLM(config).eval(), tokenizer


def short_text() -> str:
    """A few hundred characters."""
    return reference_text(600)


def main() -> None:
    """Be the fresh process."""
    restart.load_model = small_model
    restart.reference_text = short_text
    restart.main(sys.stdin.read())


if __name__ == "__main__":
    main()
