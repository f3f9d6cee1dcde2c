"""Results as values: what a connector or a library call says instead of raising."""

from __future__ import annotations

from enum import Enum
from typing import Any, Generic, TypeVar, cast

T = TypeVar("T")
_MISSING: Any = object()


class StatusCodes(Enum):
    """What came of a call; the names of the documented interface."""

    OK = 0
    ERROR = 1
    NOT_FOUND = 2
    INVALID = 3
    OUT_OF_MEMORY = 4
    TIMEOUT = 5
    DENIED = 6
    CANCELLED = 7


class Status(Generic[T]):
    """A code and, where there is one, a value: the result of a success, or what explains a failure.

    Parameters
    ----------
    error_code:
        A code, or another status whose code and value are taken over.
    value:
        The result; a message or an exception where the code is not OK.
    """

    __slots__ = ("error_code", "value")

    def __init__(
        self, error_code: StatusCodes | Status[Any] = StatusCodes.OK, value: T | BaseException | str | None = None
    ) -> None:
        self.error_code: StatusCodes
        self.value: T | BaseException | str | None = value
        if isinstance(error_code, Status):
            self.error_code = error_code.error_code
            self.value = error_code.value if value is None else value
        else:
            self.error_code = error_code

    @classmethod
    def ok(cls, value: T | None = None) -> Status[T]:
        """A success."""
        return cls(StatusCodes.OK, value)

    def get(self, default: Any = _MISSING) -> T:
        """The value of a success; of a failure *default*, or without one the exception that explains it."""
        if self.is_ok():
            return cast(T, self.value)
        if default is not _MISSING:
            return cast(T, default)
        self.raise_if_has_exception()
        raise RuntimeError(str(self))

    def raise_if_has_exception(self) -> None:
        """Raise the exception that explains a failure, where it is one."""
        if isinstance(self.value, BaseException):
            raise self.value

    def is_ok(self) -> bool:
        """Whether the call succeeded."""
        return self.error_code is StatusCodes.OK

    def is_error(self) -> bool:
        """Whether it failed without a more precise code."""
        return self.error_code is StatusCodes.ERROR

    def is_not_found(self) -> bool:
        """Whether the key is not there: a miss, not a failure."""
        return self.error_code is StatusCodes.NOT_FOUND

    def is_invalid(self) -> bool:
        """Whether the arguments or the stored value cannot be right."""
        return self.error_code is StatusCodes.INVALID

    def is_out_of_memory(self) -> bool:
        """Whether there was no room."""
        return self.error_code is StatusCodes.OUT_OF_MEMORY

    def is_timeout(self) -> bool:
        """Whether time ran out."""
        return self.error_code is StatusCodes.TIMEOUT

    def is_denied(self) -> bool:
        """Whether a policy or the server refused."""
        return self.error_code is StatusCodes.DENIED

    def is_cancelled(self) -> bool:
        """Whether the call was given up."""
        return self.error_code is StatusCodes.CANCELLED

    def __bool__(self) -> bool:
        raise TypeError("a Status is neither true nor false; ask is_ok(), or take .value")

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Status):
            return NotImplemented
        return self.error_code is other.error_code and bool(self.value == other.value)

    __hash__ = None  # type: ignore[assignment]  # values need not be hashable

    def __repr__(self) -> str:
        return f"Status({self.error_code.name}{'' if self.value is None else f', {self.value!r}'})"
