"""Helper processes: a client that freezes or crashes takes its child with it, and nothing else."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import Executor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tests.servers import until

from kvcache_factory.connector import MemoryRegion
from kvcache_factory.connector.helper import Shared
from kvcache_factory.connector.priskv import PrisKVConnector, PrisKVOptions
from kvcache_factory.memory.shared import SharedSlab
from kvcache_factory.memory.slab import Slab
from kvcache_factory.testing.connectors import PAGE, Call, Memory

pytestmark = pytest.mark.usefixtures("standins")
FREEZE, CRASH = b"misbehave/freeze", b"misbehave/crash"


@pytest.fixture
def call() -> Iterator[Call]:
    loop = asyncio.new_event_loop()
    yield Call(loop, 60.0)
    loop.close()


def made(executor: Executor, **options: Any) -> Any:
    return PrisKVConnector.from_options("conn", executor, PrisKVOptions(**options))


@pytest.fixture
def connector(executor: Executor) -> Iterator[Any]:
    connector = made(executor, timeout_s=1.0)
    assert connector.open().is_ok()
    yield connector
    connector.close()


def alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


def answers(connector: Any, call: Call) -> bool:
    """Whether a new helper is there; one that died is not replaced at once."""
    return bool(call(connector.exists(b"absent")).is_not_found())


def test_a_frozen_client_is_killed_when_its_time_is_over(connector: Any, call: Call) -> None:
    """It holds the interpreter's lock of its own process; ours goes on meanwhile.  Then there is a new one."""
    memory, first = Memory(PAGE), connector.helper_pid
    assert call(connector.put(b"key", memory[0])).is_ok()

    async def freeze_and_count() -> tuple[Any, int]:
        frozen, ticks = asyncio.ensure_future(connector.get(FREEZE, memory[1])), 0
        while not frozen.done():
            await asyncio.sleep(0.01)
            ticks += 1
        return frozen.result(), ticks

    status, ticks = call(freeze_and_count())
    assert status.is_timeout()
    assert "killed" in str(status.value)
    assert ticks > 1
    assert not alive(first)
    until(lambda: answers(connector, call), "a new helper answers")
    assert call(connector.get(b"key", memory[1])).is_ok()
    assert np.array_equal(memory.row(memory.bytes, 1), memory.original(0))
    assert connector.helper_pid not in (None, first)


def test_a_crashed_client_is_a_failure_and_replaced(connector: Any, call: Call) -> None:
    """A segmentation fault is a status that names the signal."""
    memory = Memory(PAGE)
    assert call(connector.put(b"key", memory[0])).is_ok()
    status = call(connector.exists(CRASH))
    assert status.is_error()
    assert "ended with -11" in str(status.value)
    refused = call(connector.exists(b"key"))  # not started again for half a second
    assert not refused.is_not_found()
    until(lambda: call(connector.exists(b"key")).is_ok(), "a new helper answers")
    assert call(connector.get(b"key", memory[1])).is_ok()
    assert np.array_equal(memory.row(memory.bytes, 1), memory.original(0))


def test_a_cancelled_call_ends_with_its_helper(executor: Executor, call: Call) -> None:
    """A caller that gives up gets its memory back at once: killing the helper ends the ownership."""
    connector, memory = made(executor, timeout_s=300.0), Memory(PAGE)
    assert connector.open().is_ok()
    pid = connector.helper_pid
    with pytest.raises(TimeoutError):
        call(asyncio.wait_for(connector.get(FREEZE, memory[0]), 0.3))
    assert not alive(pid)
    connector.close()


def test_memory_in_a_file_without_a_name_is_used_as_it_is(executor: Executor, call: Call) -> None:
    """A shared slab: the area for copies is far too small for these values, and not needed."""
    slab, private = SharedSlab(4, 2 << 20), Slab(2, 2 << 20)
    connector = made(executor, copy_mb=1)
    try:
        slab.view[:2] = np.random.default_rng(0).integers(0, 256, (2, 2 << 20), np.uint8)
        private.view[:] = 1
        assert connector.open().is_ok()
        assert connector.register_slabs([torch.from_numpy(s.view.reshape(-1)) for s in (slab, private)]).is_ok()
        regions = [MemoryRegion(slab.view.reshape(-1), row * slab.slot_bytes, slab.slot_bytes) for row in range(4)]
        assert all(s.is_ok() for s in call(connector.mput([b"a", b"b"], regions[:2])))
        assert all(s.is_ok() for s in call(connector.mget([b"a", b"b"], regions[2:])))
        assert np.array_equal(slab.view[2:], slab.view[:2])
        elsewhere = MemoryRegion(private.view.reshape(-1), 0, private.slot_bytes)
        refused = call(connector.put(b"c", elsewhere))
        assert refused.is_invalid()
        assert "copy_mb" in str(refused.value)
        del regions, elsewhere
    finally:
        connector.close()
        slab.close()
        private.close()


def test_shared_memory_is_mapped_again_by_the_next_helper(executor: Executor, call: Call) -> None:
    """What was registered stays registered."""
    slab, connector = SharedSlab(2, 2 << 20), made(executor, copy_mb=1)
    assert connector.open().is_ok()
    assert connector.register_slabs([torch.from_numpy(slab.view.reshape(-1))]).is_ok()
    assert call(connector.exists(CRASH)).is_error()
    until(lambda: answers(connector, call), "a new helper answers")
    slab.view[0] = 7
    source, target = (MemoryRegion(slab.view.reshape(-1), row * slab.slot_bytes, slab.slot_bytes) for row in (0, 1))
    assert call(connector.put(b"key", source)).is_ok()
    assert call(connector.get(b"key", target)).is_ok()
    assert (slab.view[1] == 7).all()
    connector.close()
    slab.close()


def test_private_memory_is_not_taken_for_shared(tmp_path: Path) -> None:
    """Only a mapping that others can map too; nothing is guessed from an address alone."""
    private = np.zeros(1 << 20, np.uint8)
    assert Shared.of(private.ctypes.data, private.nbytes) is None
    slab = SharedSlab(1, 1 << 20)
    shared = Shared.of(slab.base, 1 << 20)
    assert shared is not None
    assert os.fstat(shared.fd).st_ino == slab.handle.inode
    assert Shared.of(slab.base, 1 << 30) is None  # it ends before that
    shared.close()
    slab.close()


def test_batches_that_wait_behind_a_dead_helper_end_with_it(connector: Any, call: Call) -> None:
    """Eight batches behind a frozen one do not take eight times its deadline."""
    memory = Memory(PAGE)

    async def all_of() -> list[Any]:
        frozen = asyncio.ensure_future(connector.exists(FREEZE))
        await asyncio.sleep(0.1)
        return await asyncio.gather(frozen, *(connector.get(b"key", memory[row]) for row in range(8)))

    started_s = time.monotonic()
    statuses = call(all_of())
    assert statuses[0].is_timeout()
    assert all(status.is_error() for status in statuses[1:4])
    assert time.monotonic() - started_s < 30.0  # a hang, not a measurement


def test_the_password_is_on_no_command_line(executor: Executor) -> None:
    """Nor in the environment: it goes through the socket."""
    connector = made(executor, password="hunter2")
    assert connector.open().is_ok()
    for name in ("cmdline", "environ"):
        assert b"hunter2" not in Path(f"/proc/{connector.helper_pid}/{name}").read_bytes()
    connector.close()


def test_no_helper_is_left_behind(connector: Any) -> None:
    """close() ends it."""
    pid = connector.helper_pid
    connector.close()
    assert not alive(pid)
    assert connector.helper_pid is None


def test_a_helper_ends_when_its_parent_was_killed(tmp_path: Path) -> None:
    """kill -9 of the engine leaves no helper behind."""
    program = (
        "import sys, time; from concurrent.futures import ThreadPoolExecutor\n"
        "from kvcache_factory.connector.priskv import PrisKVConnector, PrisKVOptions\n"
        "c = PrisKVConnector.from_options('conn', ThreadPoolExecutor(1), PrisKVOptions())\n"
        "assert c.open().is_ok(); print(c.helper_pid, flush=True); time.sleep(600)\n"
    )
    path = os.pathsep.join(p for p in sys.path if p)
    with subprocess.Popen(
        [sys.executable, "-c", program], stdout=subprocess.PIPE, env={**os.environ, "PYTHONPATH": path}, text=True
    ) as parent:
        assert parent.stdout is not None
        helper = int(parent.stdout.readline())
        assert alive(helper)
        parent.kill()
    until(lambda: not alive(helper) or Path(f"/proc/{helper}/stat").read_text().split()[2] == "Z", "the helper ends")


def test_a_connector_can_be_used_from_many_threads(connector: Any, standins: Path) -> None:
    """Loops of several threads share one helper; nobody gets another's answer."""
    memory = Memory(PAGE)
    wrong: list[int] = []

    def work(number: int) -> None:
        loop = asyncio.new_event_loop()
        run = Call(loop, 60.0)
        for turn in range(10):
            key = b"%d/%d" % (number, turn)
            fine = (
                run(connector.put(key, memory[number])).is_ok() and run(connector.get(key, memory[4 + number])).is_ok()
            )
            if not fine or not np.array_equal(memory.row(memory.bytes, 4 + number), memory.original(number)):
                wrong.append(number)
        loop.close()

    threads = [threading.Thread(target=work, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []
