"""Real text for measurements: the language reference that every Python carries, in two halves that share no chapter."""

from __future__ import annotations

import pydoc_data.topics
import re
from typing import Any

from ..errors import ConfigError

NEEDLE = "The secret number of the lighthouse is 74193."
QUESTION = "\n\nThe secret number of the lighthouse is"
ANSWER = " 74193"


def chapters(half: int) -> str:
    """Half (0 or 1) of the chapters, in the order of their names; layout blanks are closed up."""
    topics = pydoc_data.topics.topics
    text = "\n\n".join(str(topics[name]) for name in sorted(topics)[half::2])
    return re.sub(r"\n\s*\n", "\n\n", re.sub(r"[ \t]+", " ", text)).strip()


def windows(tokenizer: Any, text: str, count: int, tokens: int) -> list[list[int]]:
    """*count* windows of *tokens* token ids each, spread over *text*; ConfigError where it is too short."""
    ids = tokenizer(text, verbose=False)["input_ids"]
    if len(ids) < count * tokens:
        raise ConfigError(f"the text has {len(ids):,} tokens; {count} windows of {tokens:,} need {count * tokens:,}")
    step = (len(ids) - tokens) // max(count, 1)
    return [ids[i * step : i * step + tokens] for i in range(count)]


def with_needle(tokenizer: Any, ids: list[int], depth: float) -> list[int]:
    """*ids* with the needle put in after the share *depth* of them, and as long as before."""
    needle = tokenizer(f"\n\n{NEEDLE}\n\n", add_special_tokens=False)["input_ids"]
    at = int(depth * (len(ids) - len(needle)))
    return [*ids[:at], *needle, *ids[at : len(ids) - len(needle)]]
