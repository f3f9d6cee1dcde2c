"""Models of two layers that are made in a moment, prompts for them, and a tokenizer of bytes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

PAD, BOS, EOS = 0, 1, 2
BLOCK = 16


def tiny_llama(seed: int = 0, **config: Any) -> LlamaForCausalLM:
    """Two layers, four query heads on two KV heads, in float32."""
    torch.manual_seed(seed)
    shape = {
        "vocab_size": 384,
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 4096,
        "pad_token_id": PAD,
        "bos_token_id": BOS,
        "eos_token_id": EOS,
        "initializer_range": 0.5,  # large weights: the next token depends strongly on all that came before
    }
    return LlamaForCausalLM(LlamaConfig(**{**shape, **config})).eval()


def prompt(length: int, seed: int = 0, rows: int = 1) -> torch.Tensor:
    """Random ids without special ones, int64 [rows, length]."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(3, 256, (rows, length), generator=generator)


def left_padded(*lengths: int) -> dict[str, torch.Tensor]:
    """A batch of prompts of these lengths, padded on the left, with its mask."""
    width = max(lengths)
    ids = torch.full((len(lengths), width), PAD)
    mask = torch.zeros_like(ids)
    for row, length in enumerate(lengths):
        ids[row, width - length :] = prompt(length, seed=row)[0]
        mask[row, width - length :] = 1
    return {"input_ids": ids, "attention_mask": mask}


@dataclass
class Outcome:
    """What three runs of the same call gave: without the cache, with it empty, with it filled."""

    plain: torch.Tensor
    status: dict[str, Any]


CHATML = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def byte_tokenizer() -> PreTrainedTokenizerFast:
    """Bytes, a few merges (so that text can be encoded in more than one way), and ChatML."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    merges = [("t", "h"), ("th", "e"), ("Ġ", "a"), ("i", "n"), ("a", "n"), ("an", "d")]
    words = ["<pad>", "<s>", "<|im_end|>", "<|im_start|>", *alphabet, *(a + b for a, b in merges)]
    raw = Tokenizer(models.BPE(vocab={word: i for i, word in enumerate(words)}, merges=merges))
    raw.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    raw.decoder = decoders.ByteLevel()
    made = PreTrainedTokenizerFast(
        tokenizer_object=raw,
        pad_token="<pad>",
        bos_token="<s>",
        eos_token="<|im_end|>",
        additional_special_tokens=["<|im_start|>"],
    )
    made.chat_template = CHATML
    return made
