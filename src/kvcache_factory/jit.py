"""Small loops over arrays, compiled by numba where it is there and run by Python where it is not.

A kernel is one Python function with a numba signature.  Until numba has compiled it (in a warm-up thread, never at
import) and where numba is absent or refused with ``KVCACHE_FACTORY_NO_NUMBA=1``, the kernel's fallback runs: a numpy
function with the same arguments and the same results, or the loop itself over memoryviews.

Most kernels take microseconds and keep the GIL: a thread that lets go of it hands it to whoever waits, and must then
wait itself until that one lets go, which takes longer than such a kernel.  Those that work on payloads *yield* it.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from types import FunctionType
from typing import Any, TypeVar

import numpy as np

_K = TypeVar("_K", bound="Kernel")
_F = TypeVar("_F", bound=Callable[..., Any])

_KERNELS: list[Kernel] = []
_LATE: list[Kernel] = []
_HELPERS: set[Any] = set()
_LOCK = threading.Lock()
_STARTING = threading.Lock()
_THREADS: list[threading.Thread] = []
_STATE = {"warm": False, "late": False, "reason": "not warmed up yet"}


def numba_refused() -> bool:
    """Whether the user refused numba through the environment."""
    return os.environ.get("KVCACHE_FACTORY_NO_NUMBA", "").strip().lower() in {"1", "true", "yes", "on"}


class Kernel:
    """A loop over arrays that is compiled when possible; call it like the function it wraps."""

    def __init__(
        self, signature: str, loop: Callable[..., Any], fallback: Callable[..., Any] | None, yields: bool = False
    ) -> None:
        self.signature = signature
        self.loop = loop
        self.fallback = fallback
        self.yields = yields
        """Whether the compiled loop lets go of the GIL."""
        self.compiled: Callable[..., Any] | None = None

    def __call__(self, *args: Any) -> Any:
        if self.compiled is not None:
            return self.compiled(*args)
        if self.fallback is not None:
            return self.fallback(*args)
        # Scalar access through a memoryview costs less than half of numpy's, and yields plain Python integers.
        return self.loop(*map(_viewed, args))

    def compile(self) -> None:
        """Compile with numba; raises what numba raises."""
        if self.compiled is None:
            self.compiled = compile_loop(self.signature, self.loop, self.yields)


def _viewed(argument: Any) -> Any:
    if isinstance(argument, tuple):
        return tuple(map(_viewed, argument))
    return memoryview(argument) if isinstance(argument, np.ndarray) else argument


def compile_loop(signature: str, loop: Callable[..., Any], yields: bool) -> Callable[..., Any]:
    """Compile *loop* for one *signature*, cached on disk where a cache can be written; it may *yield* the GIL."""
    import numba

    options = {"nogil": yields, "boundscheck": False}
    loop = _with_compiled_helpers(loop, numba.njit(**options))
    if not yields and isinstance(loop, FunctionType):
        loop = _copy(loop, {})
        loop.__qualname__ += "_holding_the_gil"  # numba's cache does not tell the two apart
    try:
        compiled: Callable[..., Any] = numba.njit(signature, cache=True, **options)(loop)
    except (RuntimeError, OSError):  # no writable cache directory: compile in every process
        compiled = numba.njit(signature, **options)(loop)
    return compiled


def helper(function: _F) -> _F:
    """Mark a plain function that kernels of the same file call: compiled with each of them, and Python otherwise.

    The file must be the same because a kernel's cached code is discarded when the kernel's own file changes.
    """
    _HELPERS.add(function)
    return function


def _with_compiled_helpers(loop: Callable[..., Any], njit: Callable[..., Any]) -> Callable[..., Any]:
    if not isinstance(loop, FunctionType):
        return loop
    named = loop.__globals__
    found = {name: named[name] for name in loop.__code__.co_names if name in named and _is_helper(named[name])}
    compiled = {name: njit(_with_compiled_helpers(function, njit)) for name, function in found.items()}
    if not compiled:
        return loop
    return _copy(loop, compiled)


def _copy(loop: FunctionType, more: dict[str, Any]) -> FunctionType:
    """The same function, which sees *more* globals, or others by their names."""
    copy = FunctionType(loop.__code__, {**loop.__globals__, **more}, loop.__name__, loop.__defaults__)
    copy.__qualname__, copy.__module__ = loop.__qualname__, loop.__module__
    return copy


def _is_helper(thing: object) -> bool:
    return isinstance(thing, FunctionType) and thing in _HELPERS


def register(made: _K) -> _K:
    """Have :func:`warm_up` compile this kernel too."""
    _KERNELS.append(made)
    return made


def kernel(
    signature: str, fallback: Callable[..., Any] | None = None, *, yields: bool = False
) -> Callable[[Callable[..., Any]], Kernel]:
    """Turn a loop over arrays into a :class:`Kernel` with this numba *signature*.

    *yields*: it takes as long as a copy of a few hundred KiB or longer, and lets go of the GIL.
    """

    def wrap(loop: Callable[..., Any]) -> Kernel:
        return register(Kernel(signature, loop, fallback, yields))

    return wrap


def late_kernel(signature: str, fallback: Callable[..., Any]) -> Callable[[Callable[..., Any]], Kernel]:
    """As :func:`kernel`, for what few processes use: compiled only after :func:`want_late`; yields the GIL."""

    def wrap(loop: Callable[..., Any]) -> Kernel:
        made = Kernel(signature, loop, fallback, yields=True)
        _LATE.append(made)
        return made

    return wrap


def want_late() -> None:
    """Have every :func:`warm_up` from now on compile late kernels, too."""
    _STATE["late"] = True


def warm_up() -> bool:
    """Compile every kernel now; True when the compiled kernels are in use afterwards."""
    with _LOCK:
        if numba_refused():
            _STATE["reason"] = "refused by KVCACHE_FACTORY_NO_NUMBA"
            return False
        try:
            for k in [*_KERNELS, *(_LATE if _STATE["late"] else ())]:  # those compiled earlier return at once
                k.compile()
        except ImportError:
            _STATE["reason"] = "numba is not installed: pip install 'kvcache-factory[fast]'"
            return False
        except Exception as error:  # a broken numba must never stop the cache: the fallbacks are complete
            for k in [*_KERNELS, *_LATE]:
                k.compiled = None
            _STATE["reason"] = f"numba failed to compile: {type(error).__name__}: {error}"
            return False
        _STATE.update(warm=True, reason="compiled by numba")
        return True


def warm_up_in_background() -> threading.Thread:
    """Start :func:`warm_up` in a daemon thread, unless one is at it, and return that thread."""
    with _STARTING:
        if not _THREADS or not _THREADS[-1].is_alive():
            thread = threading.Thread(target=warm_up, name="kvcache-factory-jit", daemon=True)
            thread.start()
            _THREADS[:] = [thread]
        return _THREADS[-1]


def is_warm() -> bool:
    """Whether a warm-up has compiled the kernels."""
    return bool(_STATE["warm"])


def status() -> str:
    """One line that says whether compiled kernels are in use, and why not."""
    return str(_STATE["reason"])
