"""Notes that say whose the identities in a directory are; ``docs/format.md`` has their fields.

Blocks carry the digest of their identity and nothing else.  The notes are for people: no block is found or believed
because of one, and one that is missing costs a name in ``inspect`` and nothing more.
"""

from __future__ import annotations

import contextlib
import os
import secrets
from pathlib import Path

import msgspec

from ...block.identity import Identity
from ...errors import ConfigError
from .directory import open_private

FOLDER = "kvcache-factory.identities"
_MOST_NOTES = 1024
_MOST_BYTES = 64 << 10


class Note(msgspec.Struct, frozen=True):
    """An identity in words.  A salt is a secret of its tenant: the note says that there is one, never which."""

    identity: str
    model: str
    kv_dtype: str
    block_tokens: int
    kv_scales: str = ""
    lora: str = ""
    namespace: str = "default"
    salted: bool = False

    def is_credible(self) -> bool:
        """Whether the digest is that of the words, as far as it can be known without the salt."""
        with contextlib.suppress(ConfigError):
            parts = (self.model, self.kv_dtype, self.block_tokens, self.kv_scales, self.lora)
            return self.salted or Identity(*parts, namespace=self.namespace).digest.hex() == self.identity
        return False


def leave_note(directory: Path, identity: Identity) -> None:
    """Write down in *directory* who *identity* is, unless it is known; raises OSError."""
    folder = directory / FOLDER
    path = note_path(directory, identity.digest.hex())
    with contextlib.suppress(FileNotFoundError):
        os.utime(path)  # in use: others are forgotten before it
        return
    with contextlib.suppress(FileExistsError):
        folder.mkdir(mode=0o700)
        folder.chmod(0o700)  # whatever the umask
    _make_room(folder)
    temporary = folder / f"{path.name}.{secrets.token_hex(4)}"
    try:
        with open(open_private(temporary, os.O_CREAT | os.O_EXCL | os.O_WRONLY), "wb") as file:
            file.write(msgspec.json.encode(_note(identity)))
        temporary.replace(path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise


def note_path(directory: Path, identity: str) -> Path:
    """Where the note on an identity is; *identity* is its digest in hexadecimal."""
    return directory / FOLDER / f"{identity}.json"


def read_notes(directory: Path) -> dict[str, Note]:
    """The notes of *directory* by identity; what cannot be read or contradicts itself is left out."""
    notes = {}
    with contextlib.suppress(OSError):
        for path in (directory / FOLDER).glob("*.json"):
            with contextlib.suppress(OSError, msgspec.MsgspecError, UnicodeDecodeError):
                with path.open("rb") as file:
                    note = msgspec.json.decode(file.read(_MOST_BYTES), type=Note)
                if note.identity == path.stem and note.is_credible():
                    notes[note.identity] = note
    return notes


def _note(identity: Identity) -> Note:
    return Note(
        identity=identity.digest.hex(),
        model=identity.model,
        kv_dtype=identity.kv_dtype,
        block_tokens=identity.block_tokens,
        kv_scales=identity.kv_scales,
        lora=identity.lora,
        namespace=identity.namespace,
        salted=bool(identity.salt),
    )


def _make_room(folder: Path) -> None:
    """Forget the notes that were not used for longest; a salt for each tenant must not fill a directory."""
    with os.scandir(folder) as entries:
        paths = [Path(entry.path) for entry in entries]
    if len(paths) >= _MOST_NOTES:
        with contextlib.suppress(FileNotFoundError):  # somebody else makes room too
            oldest = sorted(paths, key=lambda path: path.stat().st_mtime_ns)
            for path in oldest[: len(paths) - _MOST_NOTES + 1]:
                path.unlink(missing_ok=True)
