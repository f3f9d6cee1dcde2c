"""A conversation keeps its own token ids: later turns find every full block of earlier ones."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from tiny_models import BLOCK, tiny_llama
from transformers import LlamaForCausalLM, PreTrainedTokenizerFast

from kvcache_factory import CacheManager
from kvcache_factory.errors import ConfigError, UnknownSessionError
from kvcache_factory.integration.transformers import ChatReply, TransformersCacheAdapter
from kvcache_factory.integration.transformers.chat import Conversation

Message = dict[str, str]

OPTIONS: dict[str, Any] = {"max_new_tokens": 40, "do_sample": False, "eos_token_id": 383}
"""Answers of 40 tokens: token 383 has no text, and the model is unlikely to end with it."""


def user(content: str) -> Message:
    return {"role": "user", "content": content}


def assistant(content: str) -> Message:
    return {"role": "assistant", "content": content}


@pytest.fixture
def adapter(
    tokenizer: PreTrainedTokenizerFast, attach: Callable[..., TransformersCacheAdapter]
) -> TransformersCacheAdapter:
    return attach(tiny_llama(vocab_size=len(tokenizer)), tokenizer=tokenizer)


@pytest.fixture
def talk(adapter: TransformersCacheAdapter, manager: CacheManager) -> Callable[..., ChatReply]:
    """Answer messages in one session."""
    session = manager.create_session("talk")

    def talk(*messages: Message, **options: Any) -> ChatReply:
        return adapter.chat(session, messages, **{**OPTIONS, **options})

    return talk


def test_the_second_turn_reuses_every_full_block_of_the_first(talk: Callable[..., ChatReply]) -> None:
    """Question and answer: all tokens whose KV was computed, in whole blocks."""
    first = talk(user("Tell me something."))
    second = talk(user("Tell me something."), assistant(first.text), user("And then?"))
    held = first.prompt_tokens + len(first.token_ids) - 1
    assert second.reused_tokens == held // BLOCK * BLOCK
    assert second.reused_tokens > first.prompt_tokens


def test_text_that_encodes_otherwise_does_not_break_the_prefix(
    talk: Callable[..., ChatReply], tokenizer: PreTrainedTokenizerFast
) -> None:
    """The answer of this model, encoded again, is other tokens; the session goes on with those it generated."""
    first = talk(user("Hello"))
    assert tokenizer(first.text, add_special_tokens=False)["input_ids"] != first.token_ids
    messages = [user("Hello")]
    reply = first
    for turn in range(4):
        messages += [assistant(reply.text), user(f"Go on, {turn}.")]
        before = reply.prompt_tokens + len(reply.token_ids) - 1
        reply = talk(*messages)
        assert reply.reused_tokens == before // BLOCK * BLOCK


def test_answers_are_those_of_the_same_ids_without_the_cache(
    talk: Callable[..., ChatReply], adapter: TransformersCacheAdapter, manager: CacheManager
) -> None:
    """The ids that a session keeps, fed to the plain model, give the same answer."""
    first = talk(user("One"))
    second = talk(user("One"), assistant(first.text), user("Two"))
    ids = manager.session("talk").data["transformers"].ids[: second.prompt_tokens]
    adapter.detach()
    given = {"input_ids": torch.tensor([ids]), "attention_mask": torch.ones(1, len(ids), dtype=torch.long)}
    plain = adapter.model.generate(**given, **OPTIONS)
    assert plain[0, len(ids) :].tolist() == second.token_ids


def test_asking_the_same_again_gives_the_same(talk: Callable[..., ChatReply]) -> None:
    """A regenerated answer starts from the same prompt ids."""
    first = talk(user("Question"))
    again = talk(user("Question"))
    assert (again.token_ids, again.prompt_tokens) == (first.token_ids, first.prompt_tokens)
    assert again.reused_tokens == (first.prompt_tokens - 1) // BLOCK * BLOCK


def test_an_edited_question_goes_on_from_the_last_turn_that_stands(talk: Callable[..., ChatReply]) -> None:
    """The second question is edited: the first turn, answer included, is reused."""
    first = talk(user("First"))
    start = [user("First"), assistant(first.text)]
    talk(*start, user("Second, as it was"))
    edited = talk(*start, user("Something else altogether"))
    held = first.prompt_tokens + len(first.token_ids) - 1
    assert edited.reused_tokens >= held // BLOCK * BLOCK


def test_a_later_turn_may_be_asked_again_after_an_edit(talk: Callable[..., ChatReply]) -> None:
    """After an edit the conversation grows from the edited turn."""
    first = talk(user("First"))
    start = [user("First"), assistant(first.text)]
    talk(*start, user("As it was"))
    edited = talk(*start, user("Edited"))
    third = talk(*start, user("Edited"), assistant(edited.text), user("Third"))
    held = edited.prompt_tokens + len(edited.token_ids) - 1
    assert third.reused_tokens == held // BLOCK * BLOCK


def test_an_edited_answer_starts_over_from_text(talk: Callable[..., ChatReply]) -> None:
    """An answer that the model did not give has no ids; only what stands before it is shared."""
    first = talk(user("Say something long enough to fill a block or two, please."))
    other = talk(
        user("Say something long enough to fill a block or two, please."), assistant("I would rather not."), user("Oh")
    )
    assert 0 < other.reused_tokens <= first.prompt_tokens


def test_a_restart_forgets_what_was_said(talk: Callable[..., ChatReply], manager: CacheManager) -> None:
    """Another first message is another conversation in the same session."""
    talk(user("First conversation"))
    second = talk(user("Second conversation"))
    conversation: Conversation = manager.session("talk").data["transformers"]
    assert len(conversation.turns) == 1
    assert len(conversation.ids) == second.prompt_tokens + len(second.token_ids)


def test_clear_session_forgets_the_conversation(talk: Callable[..., ChatReply], manager: CacheManager) -> None:
    """After clearing, nothing of the session is left to reuse, and the id still works."""
    first = talk(user("Something private that fills a block"))
    manager.clear_session("talk")
    again = talk(user("Something private that fills a block"))
    assert again.reused_tokens == 0
    assert again.token_ids == first.token_ids


def test_sessions_do_not_mix(adapter: TransformersCacheAdapter, manager: CacheManager) -> None:
    """Two sessions with one opening share its blocks and nothing of what follows."""
    one, two = manager.create_session("one"), manager.create_session("two")
    opening = user("The same opening for everyone, long enough for a block")
    first = adapter.chat(one, [opening], **OPTIONS)
    other = adapter.chat(two, [opening], **OPTIONS)
    assert other.reused_tokens == (first.prompt_tokens - 1) // BLOCK * BLOCK
    adapter.chat(one, [opening, assistant(first.text), user("A")], **OPTIONS)
    assert len(two.data["transformers"].turns) == 1


def test_an_answer_that_ends_with_the_turn_token_is_joined_once(talk: Callable[..., ChatReply]) -> None:
    """The template writes the end-of-turn token behind an answer that already ends with it: it must not come twice."""
    first = talk(user("Hello"), max_new_tokens=3)
    stop = first.token_ids[-1]
    assert talk(user("Hello"), max_new_tokens=3, eos_token_id=stop).token_ids[-1] == stop


def test_joined_ids_spell_the_rendered_text(tokenizer: PreTrainedTokenizerFast) -> None:
    """Whatever the answer's tokens were, the prompt of the next turn decodes to what the template writes."""
    end = tokenizer.convert_tokens_to_ids("<|im_end|>")
    letters = [tokenizer.convert_tokens_to_ids(c) for c in "then"]  # not how the tokenizer would write "then"
    assert letters != tokenizer("then", add_special_tokens=False)["input_ids"]
    for answer_ids in (letters, [*letters, end]):
        conversation = Conversation()
        messages = [user("Hi")]
        text, prompt = conversation.prompt(tokenizer, messages)
        conversation.record(messages, text, prompt, answer_ids, "then")
        longer = [*messages, assistant("then"), user("Bye")]
        text, ids = conversation.prompt(tokenizer, longer)
        assert ids[: len(prompt) + 4] == [*prompt, *letters]
        assert tokenizer.decode(ids) == text


def test_a_template_that_trims_what_it_quotes(tokenizer: PreTrainedTokenizerFast) -> None:
    """Blanks around an answer, which such a template leaves out, do not lose the turn."""
    import copy

    trimming = copy.deepcopy(tokenizer)
    trimming.chat_template = tokenizer.chat_template.replace("m['content']", "m['content'] | trim")
    conversation = Conversation()
    messages = [user("Hi")]
    text, prompt = conversation.prompt(trimming, messages)
    answer_ids = trimming(" then ", add_special_tokens=False)["input_ids"]
    conversation.record(messages, text, prompt, answer_ids, " then ")
    _, ids = conversation.prompt(trimming, [*messages, assistant(" then "), user("Bye")])
    assert ids[: len(prompt) + len(answer_ids)] == [*prompt, *answer_ids]


def test_other_template_arguments_are_another_rendering(tokenizer: PreTrainedTokenizerFast) -> None:
    """Tools or switches of the template change the text from its beginning."""
    conversation = Conversation()
    text, prompt = conversation.prompt(tokenizer, [user("Hi")])
    conversation.record([user("Hi")], text, prompt, [5, 6], "x")
    conversation.prompt(tokenizer, [user("Hi")], enable_thinking=False)
    assert conversation.turns == []


def test_a_session_may_be_named_by_its_id(adapter: TransformersCacheAdapter, manager: CacheManager) -> None:
    """The session or its id; an id that is not there is an error."""
    manager.create_session("named")
    assert adapter.chat("named", [user("Hi")], **OPTIONS).token_ids
    with pytest.raises(UnknownSessionError, match="nobody"):
        adapter.chat("nobody", [user("Hi")])


def test_after_detach_the_conversation_goes_on_without_the_cache(
    talk: Callable[..., ChatReply], adapter: TransformersCacheAdapter
) -> None:
    """Same ids, same answer, nothing loaded."""
    first = talk(user("Hello"))
    messages = [user("Hello"), assistant(first.text), user("More")]
    warm = talk(*messages)
    adapter.detach()
    cold = talk(*messages)
    assert (cold.token_ids, cold.reused_tokens) == (warm.token_ids, 0)


def test_chat_says_what_it_needs(attach: Callable[..., Any], model: LlamaForCausalLM, manager: CacheManager) -> None:
    """No tokenizer and no messages are errors that say what to do."""
    manager.create_session("s")
    adapter = attach(model)
    with pytest.raises(ConfigError, match="tokenizer=tokenizer"):
        adapter.chat("s", [user("Hi")])
    adapter.tokenizer = object()
    with pytest.raises(ConfigError, match="at least one message"):
        adapter.chat("s", [])


@pytest.mark.parametrize(
    "messages",
    [
        [{"content": "Hi"}],
        [{"role": "user"}],
        [{"role": 7, "content": "Hi"}],
        ["Hi"],
        "Hi",
        {"role": "user", "content": "Hi"},
        7,
        [{"role": "user", "content": "Hi"}, None],
    ],
)
def test_messages_that_are_none_are_typed_errors(
    adapter: TransformersCacheAdapter, manager: CacheManager, messages: Any
) -> None:
    """What the template engine would make of them is nobody's business."""
    manager.create_session("s")
    with pytest.raises(ConfigError, match="chat"):
        adapter.chat("s", messages)


def test_what_a_template_refuses_is_a_typed_error(
    adapter: TransformersCacheAdapter, manager: CacheManager, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Roles that must alternate, for one: the template says so, and the error says which roles came."""
    manager.create_session("s")
    monkeypatch.setattr(adapter.tokenizer, "chat_template", "{{ raise_exception('roles must alternate') }}")
    with pytest.raises(ConfigError, match=r"roles: user, user\).*roles must alternate"):
        adapter.chat("s", [user("Hi"), user("Hi")])


def test_a_fork_goes_on_by_itself(adapter: TransformersCacheAdapter, manager: CacheManager) -> None:
    """Both find the common beginning, and neither has the other's turns."""
    manager.create_session("main")
    question = user("Tell me about the sea, and at some length.")
    first = adapter.chat("main", [question], **OPTIONS)
    manager.fork_session("main", "try")
    said = [question, assistant(first.text)]
    replies = [
        adapter.chat(name, [*said, user(text)], **OPTIONS) for name, text in (("main", "More."), ("try", "Stop."))
    ]
    assert all(reply.reused_tokens >= len(first.token_ids) for reply in replies)
    talks = [manager.session(name).data["transformers"] for name in ("main", "try")]
    assert talks[0].ids != talks[1].ids
    assert [len(talk.turns) for talk in talks] == [2, 2]
