"""Copies between a CUDA device and the host that run beside the engine's work: pinned memory, a stream of their own.

Not run on a GPU so far: the tests run this over a stand-in for ``torch.cuda`` that notes the order of calls.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

PIN_BYTES = 16 << 30
"""Registered in one call at most, so that closing need not wait for all of a large slab."""

_log = logging.getLogger("kvcache_factory.memory")
_lock = threading.Lock()
_streams: dict[str, Any] = {}


@contextmanager
def beside_compute(*devices: str) -> Iterator[None]:
    """Queue the copies inside on a stream of their own, behind what the engine has queued until now.

    Leaving waits for an event after these copies, not for the device: what the engine queues meanwhile goes on.
    Without a CUDA device among *devices* nothing happens.
    """
    device = next((device for device in devices if device.startswith("cuda")), None)
    if device is None:
        yield
        return
    import torch

    side, current = _stream(device), torch.cuda.current_stream(device)
    if current == side:  # a part of a longer copy, which waits for all of it
        yield
        return
    side.wait_stream(current)
    try:
        with torch.cuda.stream(side):
            yield
    finally:  # also what was queued before an error must end before its memory goes
        side.record_event().synchronize()


def _stream(device: str) -> Any:
    import torch

    with _lock:
        if device not in _streams:
            _streams[device] = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        return _streams[device]


class Pin:
    """Registers host memory with CUDA in the background, so that a device's copy engine reaches it by itself.

    Copies are right before, during and without it, only slower.  Pieces end where slots do: no slot lies in two.

    Parameters
    ----------
    base, slots, slot_bytes:
        The memory, page aligned, which must stay until :meth:`stop` has returned.
    """

    def __init__(self, base: int, slots: int, slot_bytes: int) -> None:
        self._base = base
        self._size = slots * slot_bytes
        self._step = max(PIN_BYTES // slot_bytes, 1) * slot_bytes
        self._registered: list[int] = []
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, name="kvcache-factory-pin", daemon=True)
        self._thread.start()

    @property
    def pinned(self) -> int:
        """Bytes that are registered."""
        return min(len(self._registered) * self._step, self._size)

    def wait(self) -> None:
        """Wait until all is registered, or refused."""
        self._thread.join()

    def stop(self) -> None:
        """End, and give back what was registered; idempotent."""
        self._stopping.set()
        self._thread.join()
        registered, self._registered = self._registered, []
        for address in registered:
            _cudart().cudaHostUnregister(address)

    def _run(self) -> None:
        try:
            cudart = _cudart()
            for offset in range(0, self._size, self._step):
                if self._stopping.is_set():
                    return
                address = self._base + offset
                status = int(cudart.cudaHostRegister(address, min(self._step, self._size - offset), 0))
                if status:
                    _log.warning("CUDA refuses to pin host memory (status %d); copies to it are slower", status)
                    return
                self._registered.append(address)
        except Exception as error:  # no CUDA after all: copies go the usual way
            _log.info("host memory is not pinned: %s: %s", type(error).__name__, error)


def _cudart() -> Any:
    import torch

    return torch.cuda.cudart()  # type: ignore[no-untyped-call]
