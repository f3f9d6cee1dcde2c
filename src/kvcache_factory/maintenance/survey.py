"""What is in a directory, read as it lies there: no lock is kept, nothing is written, and processes may be using it."""

from __future__ import annotations

import contextlib
import os
import re
import time
from pathlib import Path

import msgspec
import numpy as np
import numpy.typing as npt

from ..errors import ConfigError, FormatError, StoreError
from ..store.disk import log
from ..store.disk.aio import reason_of
from ..store.disk.directory import DIRECTORY_VERSION, MARKER, Directory, Listing, fcntl, try_lock
from ..store.disk.identities import Note, read_notes
from ..store.disk.presence import Process, others


class SegmentView(msgspec.Struct):
    """One segment as its files describe it.

    Attributes:
        header: of the log; None where the segment cannot be read, and *trouble* says in a few words why.
        live: whether a living process owns it.
        owner_pid: the last process that said so, alive or dead, as its own system numbers it; 0 for none.
        damaged: records of the log that are passed over.
        records: one PUT record for each block.
    """

    number: int
    header: log.LogHeader | None
    data_bytes: int
    file_bytes: int
    live: bool
    owner_pid: int
    damaged: int
    records: log.Records
    trouble: str = ""

    @property
    def name(self) -> str:
        """The name that its files share."""
        return f"{self.number:08x}"

    @property
    def slot_bytes(self) -> int:
        """Bytes of one slot, 0 where that is not known."""
        return self.header.slot_bytes if self.header else 0


class Survey(msgspec.Struct):
    """A directory at one moment, or at many where others write to it meanwhile."""

    directory: Directory
    used_bytes: int
    segments: list[SegmentView]
    processes: list[Process]
    notes: dict[str, Note]
    now_ns: int

    @property
    def whole(self) -> list[SegmentView]:
        """The segments that can be read."""
        return [one for one in self.segments if one.header is not None]


def open_directory(path: str | os.PathLike[str]) -> Directory:
    """The directory of a disk tier at *path*.

    Raises ConfigError for what is none: nothing there, a file, another program's directory, a newer version, no
    permission; StoreError when the disk fails.
    """
    if fcntl is None:
        raise ConfigError("a disk tier needs file locks that this system does not have")
    directory = Directory(path)
    try:
        if not directory.path.exists():
            raise ConfigError(f"{directory.path} does not exist; give the path that DiskBackend was given")
        if not directory.path.is_dir():
            raise ConfigError(f"{directory.path} is a file; give the directory of a disk tier")
        marker = (directory.path / MARKER).read_bytes()[:256].decode("ascii", "replace")
    except FileNotFoundError:
        raise ConfigError(
            f"{directory.path} is not the directory of a disk tier: it has no {MARKER}; "
            "give the path that DiskBackend was given"
        ) from None
    except PermissionError:
        raise ConfigError(f"no permission to read {directory.path}; run this as its owner") from None
    except OSError as error:
        raise StoreError(f"cannot read {directory.path}: {error.strerror or error}", reason_of(error)) from error
    match = re.search(r"^version (\d{1,9})$", marker, re.MULTILINE)
    if match is None or int(match[1]) > DIRECTORY_VERSION:
        raise ConfigError(
            f"{directory.path} was written by something else or by a newer version; "
            f"this library reads directories of version {DIRECTORY_VERSION}"
        )
    return directory


def survey(path: str | os.PathLike[str]) -> Survey:
    """Look at everything in the directory at *path* but the blocks' own bytes; errors as :func:`open_directory`."""
    directory = open_directory(path)
    try:
        listing = directory.list()
        processes = others(directory, listing.processes, "")
        segments = [view_segment(directory, number, listing) for number in sorted(listing.logs | listing.data)]
    except PermissionError:
        raise ConfigError(f"no permission to read {directory.path}; run this as its owner") from None
    except OSError as error:
        raise StoreError(f"cannot read {directory.path}: {error.strerror or error}", reason_of(error)) from error
    there = [one for one in segments if one is not None]
    return Survey(directory, listing.used_bytes, there, processes, read_notes(directory.path), time.time_ns())


def view_segment(directory: Directory, number: int, listing: Listing) -> SegmentView | None:
    """One segment as its log describes it; None when it was removed meanwhile."""
    data_bytes, log_bytes = listing.data.get(number, 0), listing.logs.get(number, 0)
    view = SegmentView(number, None, data_bytes, data_bytes + log_bytes, False, 0, 0, np.empty(0, log.RECORD))
    if number not in listing.logs or number not in listing.data:
        view.trouble = "no log" if number in listing.data else "no data"
        return view
    try:
        _read(directory.log_path(number), view)
    except FileNotFoundError:
        return None
    except FormatError as error:
        view.trouble = str(error)
    except OSError as error:
        view.trouble = f"cannot be read: {error.strerror or error}"
    return view


def _read(path: Path, view: SegmentView) -> None:
    fd = os.open(path, os.O_RDONLY)
    try:
        view.live = not try_lock(fd)
        header = log.LogHeader.unpack(os.pread(fd, log.HEADER_BYTES, 0))
        if header.number != view.number:
            raise FormatError(f"a copy of segment {header.number:08x}")
        tail = log.read_from(fd, view.number, 0, os.fstat(fd).st_size)
    finally:
        os.close(fd)
    view.header, view.damaged = header, tail.damaged
    owners = tail.records["depth"][tail.records["kind"] == log.Kind.OWNER]
    view.owner_pid = int(owners[-1]) if len(owners) else 0
    view.records = log.live(tail.records, min(header.slots, view.data_bytes // header.slot_bytes))


def is_live(directory: Directory, number: int) -> bool:
    """Whether a living process owns the segment now."""
    with contextlib.suppress(OSError):
        fd = os.open(directory.log_path(number), os.O_RDONLY)
        try:
            return not try_lock(fd)
        finally:
            os.close(fd)
    return False


def identities_in(records: log.Records) -> tuple[list[str], npt.NDArray[np.int64]]:
    """The identities that *records* name, in hexadecimal, and for each record the number of its own."""
    words = np.ascontiguousarray(records["identity"])
    if not len(words):
        return [], np.empty(0, np.int64)
    found, number = np.unique(words.view("V16").reshape(-1), return_inverse=True)
    return [digest.tobytes().hex() for digest in found], number.reshape(-1).astype(np.int64)
