"""Every exception of the library.

A miss is a value, a failure is one of these, misuse is an assertion.  Each message says what went wrong, where, and
what to do about it.

    KVCacheError
    ├── ConfigError (ValueError)        a setting, an argument or a combination that cannot work
    │   ├── CapacityError               a size that is zero, negative, or too small for one block
    │   └── DeviceError                 a device that is not there
    ├── LayoutError (ValueError)        tensors, shapes, dtypes or layer kinds that cannot be restored exactly
    ├── TokenError (ValueError)         token ids that are negative, too large, or not integers
    ├── FormatError                     a slot image that this version cannot read
    ├── TraceError                      a trace that cannot be read, or holds no request
    ├── SessionError
    │   ├── UnknownSessionError (KeyError)
    │   └── SessionExistsError
    ├── StoreError                      a place where bytes rest has failed
    ├── ClosedError                     used after close()
    ├── UnsupportedGenerationError      a decoding mode that a warm cache would corrupt
    └── MissingDependencyError (ImportError)
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable


class KVCacheError(Exception):
    """Base of every exception that the library raises on purpose."""


class ConfigError(KVCacheError, ValueError):
    """A setting, an argument or a combination of them cannot work."""


class CapacityError(ConfigError):
    """A capacity is zero, negative, or too small to hold one block."""


class DeviceError(ConfigError):
    """A device was asked for that this machine does not have."""


class LayoutError(KVCacheError, ValueError):
    """Tensors, dtypes or layers whose KV cannot be described, or not restored exactly."""


class TokenError(KVCacheError, ValueError):
    """Token ids that are negative, larger than 32 bits, or not integers."""


class FormatError(KVCacheError):
    """A slot image that is damaged, foreign, or of a version this library does not read."""


class TraceError(KVCacheError):
    """A trace that cannot be read, or holds no request."""


class SessionError(KVCacheError):
    """Base of the session errors."""


class UnknownSessionError(SessionError, KeyError):
    """No session with this id exists in this manager."""

    def __str__(self) -> str:  # KeyError would show the repr of the message
        return str(self.args[0]) if self.args else ""


class SessionExistsError(SessionError):
    """A session with this id exists already."""


class StoreError(KVCacheError):
    """A store could not do what was asked; ``reason`` is the one word under which that is counted."""

    def __init__(self, message: str, reason: str = "failed") -> None:
        super().__init__(message)
        self.reason = reason


class ClosedError(KVCacheError):
    """The object was used after it was closed."""


class UnsupportedGenerationError(KVCacheError):
    """A decoding mode that a warm cache would silently corrupt."""


class MissingDependencyError(KVCacheError, ImportError):
    """An optional package is needed; the message names the pip command."""

    @classmethod
    def of(cls, package: str, extra: str, purpose: str) -> MissingDependencyError:
        return cls(f"{purpose} needs the package {package!r}; install it with: pip install 'kvcache-factory[{extra}]'")


def instead_of(name: str, known: Iterable[str]) -> str:
    """What to do about a *name* that is none of the *known* ones: the end of a message."""
    names = {one.lower(): one for one in sorted(known)}
    near = [names[one] for one in difflib.get_close_matches(name.lower(), names, 3)]
    return f"did you mean {' or '.join(near)}?" if near else f"use one of {', '.join(names.values())}"
