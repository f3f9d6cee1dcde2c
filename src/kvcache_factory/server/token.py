"""The token that guards what changes state: from the environment, or from a file that only this user can read."""

from __future__ import annotations

import contextlib
import hmac
import os
import secrets
import stat
import tempfile
from pathlib import Path

from ..errors import ConfigError

VARIABLE = "KVCACHE_FACTORY_TOKEN"


def file_of(port: int) -> Path:
    """Where the token of the server on *port* lies, unless the environment has one."""
    base = os.environ.get("XDG_RUNTIME_DIR") or tempfile.gettempdir()
    user = os.getuid() if hasattr(os, "getuid") else "user"
    return Path(base) / f"kvcache-factory-{user}" / f"token-{port}"


def publish(port: int) -> None:
    """Write a new token for *port*; nothing where the environment has one.  Raises ConfigError."""
    if os.environ.get(VARIABLE):
        return
    path = file_of(port)
    try:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        _check_owner(path.parent)
        path.unlink(missing_ok=True)
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        with os.fdopen(descriptor, "w", encoding="ascii") as file:
            file.write(secrets.token_hex(32))
    except OSError as error:
        raise ConfigError(f"no token can be written to {path}: {error}; set {VARIABLE} instead") from error


def withdraw(port: int) -> None:
    """Remove the token of a server that has ended."""
    with contextlib.suppress(OSError, ConfigError):
        if not os.environ.get(VARIABLE):
            file_of(port).unlink(missing_ok=True)


def read(port: int, path: Path | None = None) -> str:
    """The token of the server on *port*; empty where there is none.  Raises ConfigError for a file of somebody else."""
    given = os.environ.get(VARIABLE, "")
    if given and path is None:
        return given
    place = path or file_of(port)
    if not place.is_file():
        return ""
    if path is None:
        _check_owner(place.parent)
    return place.read_text(encoding="ascii").strip()


def matches(given: str, expected: str) -> bool:
    """Whether a request may change state; compared in constant time, and never when there is no token."""
    return bool(expected) and hmac.compare_digest(given.encode(), expected.encode())


def _check_owner(folder: Path) -> None:
    status = os.lstat(folder)
    strange = not stat.S_ISDIR(status.st_mode) or (hasattr(os, "getuid") and status.st_uid != os.getuid())
    if strange or status.st_mode & 0o077:
        raise ConfigError(f"{folder} is not a directory that only this user can enter; remove it, or set {VARIABLE}")
