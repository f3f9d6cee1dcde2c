"""REDIS when servers die, freeze, are full, come back, or are none."""

from __future__ import annotations

import asyncio
import threading
import time
from concurrent.futures import Executor
from typing import Any

import numpy as np
import pytest
from tests.connector.test_redis import redis
from tests.servers import redis_answers, redis_cluster, redis_server, until

from kvcache_factory.connector import redis_nodes
from kvcache_factory.connector.resp import Access, Address, RespConnection
from kvcache_factory.status import StatusCodes
from kvcache_factory.testing.connectors import PAGE, Call, Memory


def test_a_dead_node_costs_its_own_keys_only(executor: Executor, call: Call) -> None:
    """kill -9 of one master between two batches: the others answer, and the dead one again when it is back."""
    memory = Memory(PAGE)
    with redis_cluster() as servers:
        connector = redis(executor, ",".join([servers[0].url, f"127.0.0.1:{servers[1].port}"]))
        assert connector.open().is_ok()
        keys = [b"key/%d" % number for number in range(60)]
        assert all(s.is_ok() for s in call(connector.mput(keys, [memory[0]] * 60)))
        servers[0].kill()
        there = [status.is_ok() for status in call(connector.mexists(keys))]
        assert 0 < sum(there) < 60
        regions = [memory[number % 4] for number in range(60)]
        assert [status.is_ok() for status in call(connector.mget(keys, regions))] == there
        assert [status.is_ok() for status in call(connector.mput(keys, regions))] == there
        codes = {status.error_code for status in call(connector.mget(keys, regions))}
        assert codes == {StatusCodes.OK, StatusCodes.NOT_FOUND}  # a miss is no failure: the others are to be asked on
        for server in servers[1:]:
            server.kill()
        assert not any(s.error_code is StatusCodes.NOT_FOUND for s in call(connector.mget(keys, regions)))
        for server in servers:
            server.start()
        until(lambda: all(s.is_ok() for s in call(connector.mput(keys, regions))), "all of them are used again")
        connector.close()


def test_a_restarted_server_is_used_again(executor: Executor, call: Call) -> None:
    """Connections that died meanwhile cost nothing: the first batch after the restart succeeds."""
    memory = Memory(PAGE)
    with redis_server() as server:
        connector = redis(executor, server.url)
        assert connector.open().is_ok()
        assert call(connector.put(b"key", memory[0])).is_ok()
        server.kill()
        refused = call(connector.put(b"key", memory[0]))
        assert refused.is_error()
        server.start()
        until(lambda: redis_answers(server.port), "the server is back")
        until(lambda: call(connector.put(b"key", memory[0])).is_ok(), "the server is used again")
        connector.close()


def test_a_frozen_server_is_a_timeout_and_a_cancelled_call_lets_go_at_once(executor: Executor, call: Call) -> None:
    """SIGSTOP: a call ends with its own time, or when it is cancelled, and its region is free then."""
    memory = Memory(2 << 20)
    with redis_server() as server:
        patient, hasty = redis(executor, server.url, timeout_s=300.0), redis(executor, server.url, timeout_s=0.2)
        assert patient.open().is_ok()
        assert hasty.open().is_ok()
        assert call(patient.put(b"key", memory[0])).is_ok()
        server.freeze()
        assert call(hasty.get(b"key", memory[1])).is_timeout()
        with pytest.raises(TimeoutError):  # of wait_for, which returns when the cancelled coroutine has ended
            call(asyncio.wait_for(patient.get(b"key", memory[2]), 0.2))
        server.thaw()
        assert call(patient.get(b"key", memory[3])).is_ok()
        assert np.array_equal(memory.row(memory.bytes, 3), memory.original(0))
        assert np.array_equal(memory.row(memory.bytes, 2), memory.original(2))
        patient.close()
        hasty.close()


def test_both_connections_let_go_when_a_large_batch_is_cancelled(executor: Executor, call: Call) -> None:
    """A frozen server: every region is free when the call has ended, and the server is used again afterwards."""
    memory, keys = Memory(4 << 20), [b"%d" % number for number in range(4)]
    with redis_server() as server:
        connector = redis(executor, server.url, timeout_s=300.0)
        assert connector.open().is_ok()
        assert all(s.is_ok() for s in call(connector.mput(keys, [memory[n] for n in range(4)])))
        server.freeze()
        with pytest.raises(TimeoutError):
            call(asyncio.wait_for(connector.mget(keys, [memory[4 + n] for n in range(4)]), 0.2))
        server.thaw()
        for n in range(4):
            assert np.array_equal(memory.row(memory.bytes, 4 + n), memory.original(4 + n))
        assert all(s.is_ok() for s in call(connector.mget(keys, [memory[4 + n] for n in range(4)])))
        connector.close()


@pytest.mark.parametrize("cluster", [False, True], ids=["alone", "cluster"])
def test_a_server_that_grants_one_connection_gives_all_of_a_large_batch(
    executor: Executor, call: Call, cluster: bool
) -> None:
    """As if only one had been asked for, and nothing is held against it; then no second is asked for, for a while."""
    memory, keys = Memory(2 << 20), [b"%d" % number for number in range(4)]
    with redis_server(cluster=cluster) as server:
        admin = RespConnection(Address(port=server.port), Access())
        if cluster:
            admin.ask("CLUSTER", "ADDSLOTSRANGE", 0, 16383)
            until(lambda: b"cluster_state:ok" in admin.ask("CLUSTER", "INFO"), "the cluster is up")
        connector = redis(executor, server.url)
        assert connector.open().is_ok()
        assert all(s.is_ok() for s in call(connector.mput(keys, [memory[n] for n in range(4)])))
        admin.ask("CONFIG", "SET", "maxclients", 1)
        admin.close()
        [node] = connector._nodes._servers.values()
        for _ in range(2):
            assert all(s.is_ok() for s in call(connector.mget(keys, [memory[4 + n] for n in range(4)])))
            for n in range(4):
                assert np.array_equal(memory.row(memory.bytes, 4 + n), memory.original(n))
                memory.row(memory.bytes, 4 + n)[:] = 0
            assert node.is_narrow
            assert node.failures == 0
        connector.close()


def test_no_part_of_a_batch_runs_on_when_another_has_raised(
    executor: Executor, call: Call, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever a server's answer leads to: when the call has ended, its regions are the caller's."""
    memory, ended = Memory(4 << 20), threading.Event()
    ask = redis_nodes.Server.ask

    def asked(self: Any, batch: Any, requests: Any, asking: bool = False) -> Any:
        if requests[0].key == b"0":
            raise UnicodeError("the name of a host that is none")
        time.sleep(0.3)
        ended.set()
        return ask(self, batch, requests, asking)

    with redis_server() as server:
        connector = redis(executor, server.url)
        assert connector.open().is_ok()
        monkeypatch.setattr(redis_nodes.Server, "ask", asked)
        assert all(s.is_error() for s in call(connector.mget([b"0", b"1"], [memory[0], memory[1]])))
        assert ended.is_set()
        connector.close()


def test_a_full_server_is_out_of_memory(executor: Executor, call: Call) -> None:
    """A server that evicts nothing refuses; what it holds can be read."""
    memory = Memory(2 << 20)
    with redis_server("--maxmemory", "16mb", "--maxmemory-policy", "noeviction") as server:
        connector = redis(executor, server.url)
        assert connector.open().is_ok()
        done = [call(connector.put(b"%d" % number, memory[0])) for number in range(12)]
        assert done[0].is_ok()
        assert done[-1].is_out_of_memory()
        assert call(connector.get(b"0", memory[1])).is_ok()
        connector.close()


@pytest.mark.parametrize(
    ("reply", "problem"),
    [
        (b"HTTP/1.1 400 Bad Request\r\n\r\n", "does not speak the protocol of Redis"),
        (b"*1\r\n*3\r\n:0\r\n:99999999999\r\n*2\r\n$1\r\nh\r\n:1\r\n", "names slots 0 to 99999999999 of 16384"),
        (b"*1\r\n*3\r\n:-5\r\n:-1\r\n*2\r\n$1\r\nh\r\n:1\r\n", "names slots -5 to -1 of 16384"),
    ],
    ids=["HTTP", "too many slots", "slots below 0"],
)
def test_a_server_of_another_kind_is_a_failure(executor: Executor, reply: bytes, problem: str) -> None:
    """Something that listens but makes no sense is named, and nothing hangs or is allocated for it."""
    import socket

    with socket.create_server(("127.0.0.1", 0)) as listener:

        def answer() -> None:
            other, _ = listener.accept()
            with other:
                other.recv(100)
                other.sendall(reply)

        thread = threading.Thread(target=answer)
        thread.start()
        port = listener.getsockname()[1]
        refused = redis(executor, f"redis://127.0.0.1:{port}").open()
        thread.join()
    assert refused.is_error()
    assert problem in str(refused.value)
