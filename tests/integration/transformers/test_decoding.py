"""Every way of decoding gives the same tokens without the cache, with an empty one, and with a filled one."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import transformers
from tiny_models import BLOCK, EOS, Outcome, left_padded, prompt, tiny_llama
from transformers import GenerationConfig, LlamaForCausalLM

Thrice = Callable[..., Outcome]
VERSION_4 = transformers.__version__ < "5"


def test_greedy_reuses_every_full_block_of_the_prompt(model: LlamaForCausalLM, thrice: Thrice) -> None:
    """The second time, all full blocks of the prompt are loaded, and the output is the same."""
    outcome = thrice(model, input_ids=prompt(100), max_new_tokens=20, do_sample=False)
    assert outcome.status["reused_tokens"] == 100 // BLOCK * BLOCK
    assert (outcome.status["lookups"], outcome.status["hits"]) == (2, 1)


@pytest.mark.parametrize("length", [1, 2, BLOCK - 1, BLOCK, BLOCK + 1, 3 * BLOCK, 3 * BLOCK + 1])
def test_the_last_token_is_always_computed(model: LlamaForCausalLM, thrice: Thrice, length: int) -> None:
    """A prompt that is stored whole still leaves a token to feed: Transformers would feed all of it again."""
    outcome = thrice(model, input_ids=prompt(length), max_new_tokens=5, do_sample=False)
    assert outcome.status["reused_tokens"] == (length - 1) // BLOCK * BLOCK


@pytest.mark.parametrize(
    "settings",
    [
        {"temperature": 1.3},
        {"top_k": 5, "top_p": 0.9},
        {"num_return_sequences": 3},
        {"num_beams": 3, "num_return_sequences": 2},
    ],
    ids=str,
)
def test_sampling_with_a_seed(model: LlamaForCausalLM, thrice: Thrice, settings: dict[str, object]) -> None:
    """The cache draws no random numbers, so a seed gives the same sample."""
    outcome = thrice(model, seed=7, input_ids=prompt(70), max_new_tokens=12, do_sample=True, **settings)
    assert outcome.status["reused_tokens"] == 64


@pytest.mark.parametrize("settings", [{"num_beams": 4}, {"num_beams": 4, "num_return_sequences": 3}], ids=str)
def test_beam_search(model: LlamaForCausalLM, thrice: Thrice, settings: dict[str, int]) -> None:
    """Beams share the prompt and nothing else that is worth keeping: only the prompt's blocks are stored."""
    outcome = thrice(model, input_ids=prompt(70), max_new_tokens=30, do_sample=False, **settings)
    assert outcome.status["saved_blocks"] == 70 // BLOCK
    assert outcome.status["reused_tokens"] == 64


def test_beams_of_a_padded_batch(model: LlamaForCausalLM, thrice: Thrice) -> None:
    """Each prompt of a batch becomes a group of beams, and each group finds its own prefix."""
    outcome = thrice(model, **left_padded(70, 50, 66), num_beams=2, max_new_tokens=8, do_sample=False)
    assert outcome.status["hits"] == 3


def test_a_left_padded_batch(model: LlamaForCausalLM, thrice: Thrice) -> None:
    """Rows of different lengths share one cached length: the shortest of what each can fill, padding included."""
    outcome = thrice(model, **left_padded(90, 40, 65), max_new_tokens=8, do_sample=False)
    # Row 1 fills 50 + 32 positions, row 0 fills 80, row 2 fills 25 + 64: 80 positions it is.
    assert outcome.status["reused_tokens"] == 80 + 30 + 55


def test_rows_of_a_padded_batch_serve_a_single_prompt(
    model: LlamaForCausalLM, attach: Callable[..., transformers.PreTrainedModel]
) -> None:
    """Padding is no part of a key: a row of a batch and the same prompt alone share their blocks."""
    alone = prompt(40, seed=1)
    plain = model.generate(alone, max_new_tokens=8, do_sample=False)
    adapter = attach(model)
    model.generate(**left_padded(90, 40), max_new_tokens=8, do_sample=False)
    assert torch.equal(model.generate(alone, max_new_tokens=8, do_sample=False), plain)
    assert adapter.status()["reused_tokens"] == 32


def test_padding_that_transformers_infers(model: LlamaForCausalLM, thrice: Thrice) -> None:
    """Without a mask Transformers takes padding tokens for padding; the cache must see the same."""
    batch = left_padded(60, 33)
    outcome = thrice(model, input_ids=batch["input_ids"], max_new_tokens=6, do_sample=False)
    assert outcome.status["prompt_tokens"] == 2 * 93


def test_a_batch_with_a_cold_row_reuses_nothing(model: LlamaForCausalLM, attach: Callable[..., object]) -> None:
    """One row that is not stored and has no padding leaves no position for the others to fill."""
    cold = prompt(64, seed=9)
    both = torch.cat([prompt(64), cold])
    plain = model.generate(both, max_new_tokens=6, do_sample=False)
    adapter = attach(model)
    model.generate(prompt(64), max_new_tokens=6, do_sample=False)
    assert torch.equal(model.generate(both, max_new_tokens=6, do_sample=False), plain)
    assert adapter.status()["reused_tokens"] == 0


@pytest.mark.parametrize("chunk", [1, 7, 64])
def test_chunked_prefill(model: LlamaForCausalLM, thrice: Thrice, chunk: int) -> None:
    """Chunks start behind what was loaded; version 4 starts them at position 0, so there it is left alone."""
    outcome = thrice(model, input_ids=prompt(75), prefill_chunk_size=chunk, max_new_tokens=6, do_sample=False)
    assert outcome.status["reused_tokens"] == (0 if VERSION_4 else 64)
    assert outcome.status["bypassed"] == ({"chunked prefill of Transformers 4": 2} if VERSION_4 else {})


def test_chunked_prefill_of_a_padded_batch(model: LlamaForCausalLM, thrice: Thrice) -> None:
    """Chunks and padding together."""
    outcome = thrice(model, **left_padded(75, 50), prefill_chunk_size=10, max_new_tokens=6, do_sample=False)
    assert outcome.status["hits"] == (0 if VERSION_4 else 2)


def test_logits_processors_see_the_whole_prompt(model: LlamaForCausalLM, thrice: Thrice) -> None:
    """Penalties on tokens of the prompt work on loaded ones too, because the ids stay whole."""
    thrice(model, input_ids=prompt(64), repetition_penalty=1.8, no_repeat_ngram_size=2, max_new_tokens=16)


def test_scores_and_logits_are_those_of_the_new_tokens(model: LlamaForCausalLM, attach: Callable[..., object]) -> None:
    """A structured output has the same fields, and logits equal up to the rounding of float32."""
    call = {"return_dict_in_generate": True, "output_logits": True, "output_scores": True, "max_new_tokens": 5}
    plain = model.generate(prompt(64), **call)
    attach(model)
    model.generate(prompt(64), **call)
    warm = model.generate(prompt(64), **call)
    assert warm.keys() == plain.keys()
    assert torch.equal(warm.sequences, plain.sequences)
    torch.testing.assert_close(torch.stack(warm.logits), torch.stack(plain.logits), rtol=1e-4, atol=1e-4)


def test_hidden_states_of_the_whole_prompt_are_computed(model: LlamaForCausalLM, thrice: Thrice) -> None:
    """Who asks for the prompt's states gets all of them: such a request loads nothing, but is saved."""
    call = {"return_dict_in_generate": True, "output_hidden_states": True, "max_new_tokens": 3}
    outcome = thrice(model, input_ids=prompt(64), **call)
    assert outcome.status["reused_tokens"] == 0
    assert outcome.status["saved_blocks"] == 4


def test_a_sequence_that_ends_early_is_saved_up_to_its_end(attach: Callable[..., object]) -> None:
    """Behind the end of a row come padding tokens, which belong to no conversation and are not stored."""
    model = tiny_llama()
    batch = prompt(32, rows=2)
    first = model.generate(batch, max_new_tokens=40, do_sample=False)
    stop = int(first[0, 40])  # row 0 will end after at most 9 tokens
    config = GenerationConfig(max_new_tokens=40, do_sample=False, eos_token_id=[stop, EOS], pad_token_id=0)
    plain = model.generate(batch, generation_config=config)
    adapter = attach(model)
    assert torch.equal(model.generate(batch, generation_config=config), plain)
    ends = [32 + int((row[32:] == stop).nonzero()[0]) + 1 if (row[32:] == stop).any() else 71 for row in plain]
    assert adapter.status()["saved_blocks"] == sum(min(end, plain.shape[1] - 1) // BLOCK for end in ends)


def test_generated_tokens_are_found_by_the_next_prompt(model: LlamaForCausalLM, attach: Callable[..., object]) -> None:
    """A prompt that continues an answer reuses the answer too, but for its last token, whose KV was never computed."""
    adapter = attach(model)
    answer = model.generate(prompt(40), max_new_tokens=25, do_sample=False)
    longer = torch.cat([answer, prompt(10, seed=3)], dim=1)
    warm = model.generate(longer, max_new_tokens=8, do_sample=False)
    assert adapter.status()["reused_tokens"] == (answer.shape[1] - 1) // BLOCK * BLOCK > 40
    adapter.detach()
    assert torch.equal(model.generate(longer, max_new_tokens=8, do_sample=False), warm)


def test_every_returned_sequence_is_saved(model: LlamaForCausalLM, attach: Callable[..., object]) -> None:
    """Sequences sampled from one prompt share its blocks and add their own."""
    adapter = attach(model)
    torch.manual_seed(1)
    answers = model.generate(prompt(32), max_new_tokens=33, do_sample=True, num_return_sequences=3, eos_token_id=383)
    assert len({tuple(row.tolist()) for row in answers}) == 3
    assert adapter.status()["saved_blocks"] == 2 + 3 * 2


def test_the_ids_it_is_given_are_never_altered(model: LlamaForCausalLM, attach: Callable[..., object]) -> None:
    """The caller's tensors are the same afterwards, and the output begins with them."""
    batch = left_padded(70, 50)
    before = {name: tensor.clone() for name, tensor in batch.items()}
    attach(model)
    for _ in range(2):
        output = model.generate(**batch, max_new_tokens=5)
        assert torch.equal(output[:, :70], before["input_ids"])
        assert all(torch.equal(batch[name], before[name]) for name in batch)


def test_a_streamer_gets_the_whole_prompt_and_every_token(
    model: LlamaForCausalLM, attach: Callable[..., object]
) -> None:
    """Streaming sees no difference."""

    class Collect(list[list[int]]):
        def put(self, value: torch.Tensor) -> None:
            self.append(value.reshape(-1).tolist())

        def end(self) -> None:
            self.append([])

    plain, cold, warm = Collect(), Collect(), Collect()
    model.generate(prompt(50), max_new_tokens=5, streamer=plain)
    attach(model)
    model.generate(prompt(50), max_new_tokens=5, streamer=cold)
    model.generate(prompt(50), max_new_tokens=5, streamer=warm)
    assert plain == cold == warm


def test_bfloat16_runs_and_reuses(attach: Callable[..., object]) -> None:
    """In bf16 equality is not promised; reuse, shape and dtype are."""
    model = tiny_llama().to(torch.bfloat16)
    adapter = attach(model)
    for _ in range(2):
        assert model.generate(prompt(64), max_new_tokens=5, do_sample=False).shape == (1, 69)
    assert adapter.status()["reused_tokens"] == 48
    assert adapter.space.spec.dtype.value == "bfloat16"


def test_inference_mode(model: LlamaForCausalLM, thrice: Thrice) -> None:
    """Tensors made under inference mode are loaded and saved like others."""
    with torch.inference_mode():
        outcome = thrice(model, input_ids=prompt(70), max_new_tokens=6, do_sample=False)
    assert outcome.status["reused_tokens"] == 64


@pytest.mark.parametrize("attention", ["eager", "sdpa"])
def test_attention_implementations(attention: str, thrice: Thrice) -> None:
    """Masks of a padded batch are built by each implementation in its own way."""
    model = tiny_llama(attn_implementation=attention)
    outcome = thrice(model, **left_padded(75, 50, 1), max_new_tokens=6, do_sample=False)
    assert outcome.status["hits"] == 2
