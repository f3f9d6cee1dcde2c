"""Users who hold conversations: what they ask next, and how long they think."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from .statistics import Statistics, draw

Tokens = npt.NDArray[np.int64]

SYSTEM_PROMPTS, SYSTEM_TOKENS = 4, 64
TOPICS_A_SESSION = 8
"""Topics after which, on average, a user leaves and somebody else comes."""
COMES_BACK = 0.25
"""Part of the changes of topic that go back to the topic before."""
SPECIAL = 3
"""Token ids below this one are the model's own."""


class Shape(NamedTuple):
    """What the model can hold, and how lengths of the statistics become lengths for it."""

    vocabulary: int
    context: int
    scale: float

    def tokens(self, length: float, most: int) -> int:
        """A length of the statistics as tokens for the model, at least one and at most so many."""
        return max(1, min(round(length * self.scale), most))


class Question(NamedTuple):
    """What a user asks: the whole prompt, how long the answer will be, and whether a new session begins with it.

    *repeated*: how many tokens the prompt begins with that were said before and answered, by this user or in front of
    another conversation.  Of an answer the last token does not count, since nothing was computed behind it.
    """

    prompt: Tokens
    answer_tokens: int
    new_session: bool
    repeated: int


class User:
    """One seat: a user, and after that one has left, the next.  What it asks follows from the seed alone."""

    def __init__(self, number: int, statistics: Statistics, shape: Shape, seed: int) -> None:
        self.number = number
        self._statistics = statistics
        self._shape = shape
        self._random = np.random.default_rng((seed, number))
        self._visits = 0
        self._said: Tokens = np.empty(0, np.int64)
        self._before: Tokens = self._said
        self._in_front = [system_prompt(number, shape) for number in range(SYSTEM_PROMPTS)]

    @property
    def session(self) -> str:
        """Name of the session of who sits here now."""
        return f"user {self.number}.{self._visits}"

    @property
    def tenant(self) -> str:
        """Label of the session."""
        return f"tenant {self.number % 4}"

    def ask(self) -> Question:
        """The next question, which goes on from the last answer or begins a new topic."""
        facts, shape, random = self._statistics, self._shape, self._random
        earlier = (self._said[:-1], self._before[:-1], *self._in_front)
        changes = random.random() < facts.new_topic
        if changes and len(self._before) and random.random() < COMES_BACK:
            self._said, self._before, changes = self._before, self._said, False
        answer = shape.tokens(draw(facts.output_tokens, random), shape.context // 8)
        more = shape.tokens(draw(facts.more_tokens, random), shape.context // 4)
        full = len(self._said) + more + answer > shape.context
        leaves = False
        if full or not len(self._said) or changes:
            self._before = self._said
            leaves = not self._visits or random.random() < 1 / TOPICS_A_SESSION
            self._visits += leaves
            if leaves:
                self._before = np.empty(0, np.int64)
            document = shape.tokens(draw(facts.first_tokens, random), shape.context // 2)
            prompt = np.concatenate((self._system_prompt(), self._words(document)))
        else:
            prompt = np.concatenate((self._said, self._words(more)))
        return Question(prompt, answer, leaves, max(common(prompt, said) for said in earlier))

    def heard(self, conversation: Tokens) -> None:
        """Prompt and answer of the last question."""
        self._said = conversation

    def pause(self, mean_s: float) -> float:
        """Seconds until the next question."""
        return draw(self._statistics.pauses, self._random) * mean_s

    @property
    def nbytes(self) -> int:
        """Bytes of what this user remembers: two topics at most, each no longer than the model's context."""
        return int(self._said.nbytes + self._before.nbytes + sum(prompt.nbytes for prompt in self._in_front))

    def _system_prompt(self) -> Tokens:
        return self._in_front[int(self._random.integers(SYSTEM_PROMPTS))]

    def _words(self, count: int) -> Tokens:
        return self._random.integers(SPECIAL, self._shape.vocabulary, count)


def system_prompt(number: int, shape: Shape) -> Tokens:
    """What applications put in front of every conversation."""
    words: Any = np.random.default_rng((number, SYSTEM_TOKENS)).integers(SPECIAL, shape.vocabulary, SYSTEM_TOKENS)
    return np.asarray(words, np.int64)


def common(one: Tokens, other: Tokens) -> int:
    """How many tokens two sequences begin with alike."""
    least = min(len(one), len(other))
    differ = np.flatnonzero(one[:least] != other[:least])
    return int(differ[0]) if len(differ) else least
