"""What a connector's statuses come to: how many leading blocks went well, and why no more."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

import msgspec

from ..status import Status, StatusCodes

_WORDS = {
    StatusCodes.NOT_FOUND: "absent",
    StatusCodes.INVALID: "invalid",
    StatusCodes.OUT_OF_MEMORY: "full",
    StatusCodes.TIMEOUT: "timeout",
    StatusCodes.DENIED: "denied",
    StatusCodes.CANCELLED: "cancelled",
}


ANYTHING = (Exception, asyncio.CancelledError, KeyboardInterrupt, SystemExit)
"""What a client may raise: one that ends the loop would end every other call with it."""


class Answers(msgspec.Struct, frozen=True):
    """How many leading blocks went well, and what came of the next."""

    count: int
    reason: str = ""
    detail: str = ""


async def together(calls: Sequence[Callable[[], Awaitable[Any]]]) -> list[Any]:
    """Every call to its end, exceptions as results: none may be running when its memory is given back."""
    return await asyncio.gather(*map(_result, calls))


async def _result(call: Callable[[], Awaitable[Any]]) -> Any:
    """What a call answers or raises: also at once, also to end the program, which would end the loop alone."""
    try:
        return await call()
    except ANYTHING as error:
        return error


def leading(answers: Sequence[object]) -> Answers:
    """What a list of statuses comes to; whatever else a connector returned is a failure.

    Among them, an Answers stands for a call that was not made.
    """
    for count, answer in enumerate(answers):
        if isinstance(answer, Answers):
            return after(Answers(count), answer)
        if isinstance(answer, Status):
            if answer.is_ok():
                continue
            return Answers(count, _WORDS.get(answer.error_code, "error"), str(answer))
        return Answers(count, "error", f"{type(answer).__name__}: {answer}")
    return Answers(len(answers))


def after(before: Answers, more: Answers) -> Answers:
    """A whole batch and the one behind it."""
    return Answers(before.count + more.count, more.reason, more.detail)
