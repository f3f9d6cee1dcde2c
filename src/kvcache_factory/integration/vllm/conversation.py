"""What a session has said through vLLM, by token ids: text that is encoded again is not always the same tokens."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from ...session import History, Session

_NAME = "vllm"


@dataclass(slots=True)
class Talk:
    """Token ids of a conversation so far, prompts and answers, and their text."""

    ids: list[int] = field(default_factory=list)
    text: str = ""

    def fork(self) -> Talk:
        """The same conversation so far, which goes on by itself."""
        return Talk(list(self.ids), self.text)

    def record(self, ids: Sequence[int], text: str) -> None:
        """Remember the whole conversation after an answer."""
        self.ids, self.text = list(ids), text


def talk_of(session: Session) -> Talk:
    """The conversation of a session; a new one after it was cleared."""
    talk: Talk = session.data.setdefault(_NAME, Talk())
    return talk


def text_of(prompt: Any) -> str | None:
    """The text of a prompt that is nothing but text; None for token ids, embeddings and media."""
    if isinstance(prompt, str):
        return prompt
    if isinstance(prompt, dict) and isinstance(prompt.get("prompt"), str):
        others = {name for name, value in prompt.items() if value is not None} - {"prompt", "cache_salt"}
        return prompt["prompt"] if not others else None
    return None


def continued(talk: Talk, prompt: Any, history: History, encode: Callable[[str], list[int]]) -> Any:
    """*prompt* with the conversation in front, where *history* asks for it and there is one."""
    text = text_of(prompt)
    if text is None or not talk.ids or history == "none":
        return prompt
    if history == "auto" and talk.text and text.startswith(talk.text):
        return prompt
    tokens = {"prompt_token_ids": [*talk.ids, *encode(text)]}
    salt = prompt.get("cache_salt") if isinstance(prompt, dict) else None
    return {**tokens, "cache_salt": salt} if salt else tokens
