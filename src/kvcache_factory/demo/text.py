"""A real text that every Python carries: the language reference behind ``help()``."""

from __future__ import annotations

import pydoc_data.topics
import re

TOPIC = "compound"
"""The chapter on compound statements: about 50,000 characters of prose and code."""

QUESTIONS = (
    "In one sentence, what is this text about?",
    "What does the else clause of a for loop do?",
    "Which statement would you use to make sure that a file is closed?",
    "How does the try statement handle an exception?",
    "What is a decorator, in one sentence?",
    "When would you use a while loop instead of a for loop?",
    "What is the match statement for?",
    "Name one thing in this text that beginners should remember.",
)


def reference_text(characters: int = 9000) -> str:
    """The beginning of the chapter, cut at the end of a paragraph: 9,000 characters are about 2,200 tokens.

    Runs of blanks and blank lines, which are layout and not content, are closed up.
    """
    text = str(pydoc_data.topics.topics[TOPIC])
    text = re.sub(r"[ \t]+", " ", text)
    text = re.sub(r"\n\s*\n", "\n\n", text).strip()
    end = text.rfind("\n\n", 0, characters)
    return text[: end if end > 0 else characters]


def question(turn: int) -> str:
    """The user's question of *turn* (1, 2, ...); they come round again after the last."""
    return QUESTIONS[(turn - 1) % len(QUESTIONS)]
