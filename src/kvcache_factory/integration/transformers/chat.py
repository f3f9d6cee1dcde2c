"""Conversations by token ids.

Text that is decoded and encoded again is not always the same tokens, and one different token loses every block behind
it.  A conversation therefore keeps the ids it was answered with, and a new turn only adds the ids of what the template
writes behind the last answer.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from ...block.key import KeyChain
from ...errors import ConfigError

Message = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class ChatReply:
    """The answer of one turn.

    Attributes:
        text: the answer, without special tokens.
        token_ids: its tokens as generated, the end-of-turn token included.
        prompt_tokens: tokens of the whole prompt.
        reused_tokens: how many of them were loaded instead of computed.
    """

    text: str
    token_ids: list[int]
    prompt_tokens: int
    reused_tokens: int


@dataclass(frozen=True, slots=True)
class Turn:
    """One answered turn: the messages it was asked with, where its prompt and its answer end, and their text."""

    messages: tuple[str, ...]
    prompt_text: str
    prompt_end: int
    answer_end: int
    answer: str


@dataclass(slots=True)
class Conversation:
    """What a session keeps: all token ids so far, and for each turn where it ends in them."""

    template: str = ""  # the template's own arguments, which change every rendering
    ids: list[int] = field(default_factory=list)
    turns: list[Turn] = field(default_factory=list)
    chain: KeyChain | None = None
    lock: threading.Lock = field(default_factory=threading.Lock)
    """Held for a whole turn: one answer at a time."""

    def fork(self) -> Conversation:
        """The same conversation so far, which goes on by itself."""
        with self.lock:
            return Conversation(self.template, list(self.ids), list(self.turns))

    def prompt(self, tokenizer: Any, messages: Sequence[Message], **template: Any) -> tuple[str, list[int]]:
        """Text and ids of the prompt for *messages*, with the ids of earlier turns wherever they still hold.

        A conversation that goes on adds to them, one whose last messages were edited goes on from the last turn that
        stands, the same messages again give the same prompt, and anything else starts over.
        """
        text = _render(tokenizer, messages, template)
        stated = [_canonical(message) for message in messages]
        if self.template != _canonical(template):
            self.ids, self.turns, self.template = [], [], _canonical(template)
        while self.turns:
            turn = self.turns[-1]
            if stated == list(turn.messages) and text == turn.prompt_text:
                return text, self.ids[: turn.prompt_end]
            rest = _behind(turn, messages, stated, text)
            if rest is not None:
                return text, self._joined(tokenizer, turn, rest)
            self.turns.pop()
        return text, _encode(tokenizer, text)

    def record(
        self, messages: Sequence[Message], text: str, prompt: Sequence[int], answer_ids: Sequence[int], answer: str
    ) -> None:
        """Remember a turn that was answered."""
        if self.turns and self.turns[-1].prompt_end >= len(prompt):
            self.turns.pop()  # asked again: the new answer takes the place of the old one
        self.ids = [*prompt, *answer_ids]
        stated = tuple(_canonical(message) for message in messages)
        self.turns.append(Turn(stated, text, len(prompt), len(self.ids), answer))

    def _joined(self, tokenizer: Any, turn: Turn, rest: str) -> list[int]:
        """The ids up to the end of *turn*'s answer, and those of the text behind it."""
        before, added = self.ids[: turn.answer_end], _encode(tokenizer, rest)
        # The answer usually ends with the token that the template writes behind it.
        if added and turn.answer_end > turn.prompt_end and before[-1] == added[0] and _is_special(tokenizer, added[0]):
            added = added[1:]
        return before + added


def _render(tokenizer: Any, messages: Sequence[Message], template: Mapping[str, Any]) -> str:
    """The prompt as the model's template writes it; ConfigError where it cannot."""
    for number, message in enumerate(messages):
        if (
            not isinstance(message, Mapping)
            or not isinstance(message.get("role"), str)
            or not ("content" in message or "tool_calls" in message)
        ):
            raise ConfigError(
                f"chat: message {number} is {message!r:.80}; give a dict with 'role' (a string) and 'content', such as "
                "{'role': 'user', 'content': 'Hello'}"
            )
    try:
        written = tokenizer.apply_chat_template(list(messages), tokenize=False, add_generation_prompt=True, **template)
    except Exception as error:
        roles = ", ".join(str(message["role"]) for message in messages)
        raise ConfigError(
            f"chat: the model's template refuses these messages (roles: {roles}): {type(error).__name__}: {error}"
        ) from error
    return str(written)


def _behind(turn: Turn, messages: Sequence[Message], stated: Sequence[str], text: str) -> str | None:
    """What the template writes behind the answer of *turn*; None where *messages* do not continue that turn."""
    n = len(turn.messages)
    if len(messages) <= n + 1 or list(stated[:n]) != list(turn.messages):
        return None
    reply = messages[n]
    if reply.get("role") != "assistant" or reply.get("content") != turn.answer or set(reply) - {"role", "content"}:
        return None
    if not text.startswith(turn.prompt_text):
        return None
    behind = text[len(turn.prompt_text) :]
    for written in (turn.answer, turn.answer.strip()):  # some templates trim what they quote
        if written and behind.startswith(written):
            return behind[len(written) :]
    return behind if not turn.answer else None


def _canonical(value: Any) -> str:
    return json.dumps(value, sort_keys=True, ensure_ascii=False, default=repr)


def _encode(tokenizer: Any, text: str) -> list[int]:
    return [int(token) for token in tokenizer(text, add_special_tokens=False)["input_ids"]]


def _is_special(tokenizer: Any, token: int) -> bool:
    return token in set(tokenizer.all_special_ids)
