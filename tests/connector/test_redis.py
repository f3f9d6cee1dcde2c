"""REDIS, with real servers of the package redis-server: alone, over TLS, behind a password, as a cluster."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from concurrent.futures import Executor, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.servers import Server, make_certificates, redis_cluster, redis_server

from kvcache_factory.connector import Connector, redis_nodes
from kvcache_factory.connector.blocking import Call as Batch
from kvcache_factory.connector.redis import RedisConnector, RedisOptions, redis_access
from kvcache_factory.connector.redis_nodes import Request, slot_of
from kvcache_factory.connector.resp import Access, Address, RespConnection
from kvcache_factory.errors import ConfigError
from kvcache_factory.testing.connectors import PAGE, Call, ConnectorTests, Memory

PASSWORD = "correct horse battery staple"


def redis(executor: Executor, url: str, **options: Any) -> RedisConnector:
    return RedisConnector.from_options("conn", executor, RedisOptions(url=url, **options))


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    with redis_server() as server:
        yield server


@pytest.fixture(scope="module")
def cluster() -> Iterator[list[Server]]:
    with redis_cluster() as servers:
        yield servers


@pytest.fixture(scope="module")
def local(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    path = tmp_path_factory.mktemp("socket") / "redis.sock"
    with redis_server("--unixsocket", str(path)):
        yield f"unix://{path}"


@pytest.fixture(scope="module")
def secure(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Server, RedisOptions]]:
    ca, certificate, key = make_certificates(tmp_path_factory.mktemp("tls"))
    options = RedisOptions(url="rediss://127.0.0.1:1", password=PASSWORD, tls_ca=str(ca))
    arguments = ["--tls-port", "{port}", "--tls-cert-file", str(certificate), "--tls-key-file", str(key)]
    arguments += [
        "--bind",
        "127.0.0.1",
        "127.0.0.2",
        "--tls-ca-cert-file",
        str(ca),
        "--tls-auth-clients",
        "no",
        "--requirepass",
        PASSWORD,
    ]
    with redis_server(*arguments, access=redis_access(options)[1]) as server:
        yield server, options


@pytest.fixture
def executor() -> Iterator[Executor]:
    with ThreadPoolExecutor(4) as executor:
        yield executor


@pytest.fixture
def call() -> Iterator[Call]:
    loop = asyncio.new_event_loop()
    yield Call(loop, 60.0)
    loop.close()


def flush(*servers: Server, access: Access | None = None) -> None:
    for server in servers:
        connection = RespConnection(Address(port=server.port), access or Access())
        connection.ask("FLUSHALL")
        connection.close()


class TestStandalone(ConnectorTests):
    @pytest.fixture(autouse=True)
    def _server(self, server: Server) -> None:
        flush(server)
        self.server = server

    def make_connector(self, executor: Executor, directory: Path) -> Connector[bytes, Any]:
        return redis(executor, self.server.url)


class TestUnixSocket(ConnectorTests):
    sizes = (PAGE,)

    @pytest.fixture(autouse=True)
    def _server(self, local: str) -> None:
        self.url = local
        connection = RespConnection(Address(path=local.removeprefix("unix://")), Access())
        connection.ask("FLUSHALL")
        connection.close()

    def make_connector(self, executor: Executor, directory: Path) -> Connector[bytes, Any]:
        return redis(executor, self.url)


class TestTLSAndPassword(ConnectorTests):
    """Certificates of an authority of our own, and a password of the default user."""

    sizes = (PAGE, 2 << 20)

    @pytest.fixture(autouse=True)
    def _server(self, secure: tuple[Server, RedisOptions]) -> None:
        self.server, self.options = secure
        flush(self.server, access=redis_access(self.options)[1])

    def make_connector(self, executor: Executor, directory: Path) -> Connector[bytes, Any]:
        return self.made(executor)

    def made(self, executor: Executor, **options: Any) -> RedisConnector:
        given = {"password": PASSWORD, "tls_ca": self.options.tls_ca, **options}
        return redis(executor, f"rediss://127.0.0.1:{self.server.port}", **given)

    def test_a_wrong_password_is_denied_and_not_shown(self, executor: Executor) -> None:
        """The status says what the server said, and no secret."""
        refused = self.made(executor, password="guess").open()
        assert refused.is_denied()
        assert "guess" not in repr(refused)

    def test_no_password_is_denied(self, executor: Executor) -> None:
        """As the server has it: the question is not answered."""
        assert self.made(executor, password="").open().is_denied()

    def test_a_server_that_nobody_vouches_for_is_refused(self, executor: Executor) -> None:
        """The system's authorities do not know ours."""
        refused = self.made(executor, tls_ca="").open()
        assert refused.is_error()
        assert "certificate" in str(refused.value).lower()

    def test_the_name_in_the_certificate_counts(self, executor: Executor) -> None:
        """Another address of the same machine is refused, unless told otherwise."""
        url, given = f"rediss://127.0.0.2:{self.server.port}", {"password": PASSWORD, "tls_ca": self.options.tls_ca}
        refused = redis(executor, url, **given).open()
        assert refused.is_error()
        assert "mismatch" in str(refused.value)
        connector = redis(executor, url, tls_check_hostname=False, **given)
        assert connector.open().is_ok()
        connector.close()

    def test_secrets_are_not_shown(self, executor: Executor) -> None:
        """Neither by options, by the connector's name, nor by what holds them on the way."""
        options = RedisOptions(url=f"redis://user:{PASSWORD}@host", password=PASSWORD)
        connector = RedisConnector.from_options("conn", executor, options)
        for shown in (repr(options), str(options), connector.name, repr(redis_access(options)), repr(vars(connector))):
            assert PASSWORD not in shown


class TestCluster(ConnectorTests):
    """Three masters; keys of one batch lie on all of them."""

    @pytest.fixture(autouse=True)
    def _server(self, cluster: list[Server]) -> None:
        flush(*cluster)
        self.servers = cluster

    def make_connector(self, executor: Executor, directory: Path) -> Connector[bytes, Any]:
        return redis(executor, self.servers[1].url)

    def test_a_batch_goes_to_all_nodes_at_once(self, executor: Executor, call: Call, tmp_path: Path) -> None:
        """One status for each key, in order, wherever it lies."""
        connector, memory = self.make_connector(executor, tmp_path), Memory(PAGE)
        assert connector.open().is_ok()
        keys = [b"key/%d" % number for number in range(64)]
        done = call(connector.mput(keys, [memory[number % 4] for number in range(64)]))
        assert all(status.is_ok() for status in done)
        held = []
        for server in self.servers:
            connection = RespConnection(Address(port=server.port), Access())
            held.append(connection.ask("DBSIZE"))
            connection.close()
        assert sum(held) == 64
        assert min(held) > 0
        done = call(connector.mget([*keys[:3], b"absent"], [memory[4], memory[5], memory[6], memory[7]]))
        assert [status.is_ok() for status in done] == [True, True, True, False]
        for number in range(3):
            assert np.array_equal(memory.row(memory.bytes, 4 + number), memory.original(number))
        assert [s.is_ok() for s in call(connector.mexists([*keys, b"absent"]))] == [True] * 64 + [False]
        connector.close()

    def test_a_slot_that_has_moved_is_followed(self, executor: Executor, call: Call, tmp_path: Path) -> None:
        """What the connector learnt at the start is wrong afterwards: it follows, and remembers."""
        connector, memory = self.make_connector(executor, tmp_path), Memory(PAGE)
        assert connector.open().is_ok()
        key = b"moving"
        slot, nodes = slot_of(key), [RespConnection(Address(port=server.port), Access()) for server in self.servers]
        ids = [node.ask("CLUSTER", "MYID").decode() for node in nodes]
        owner = next(i for i, node in enumerate(nodes) if _owns(node, ids[i], slot))
        target = (owner + 1) % 3
        try:
            _move(nodes, ids, slot, target)
            assert call(connector.put(key, memory[0])).is_ok()
            assert nodes[target].ask("DBSIZE") == 1
            assert call(connector.get(key, memory[1])).is_ok()
            assert np.array_equal(memory.row(memory.bytes, 1), memory.original(0))
            # In the middle of a move the old owner sends those who ask for what has left to the new one.
            nodes[owner].ask("CLUSTER", "SETSLOT", slot, "IMPORTING", ids[target])
            nodes[target].ask("CLUSTER", "SETSLOT", slot, "MIGRATING", ids[owner])
            nodes[target].ask("MIGRATE", "127.0.0.1", self.servers[owner].port, key, 0, 5000)
            assert call(connector.get(key, memory[2])).is_ok()
            assert np.array_equal(memory.row(memory.bytes, 2), memory.original(0))
        finally:
            _move(nodes, ids, slot, owner)
            connector.close()
            for node in nodes:
                node.close()


def _owns(node: RespConnection, own: str, slot: int) -> bool:
    ranges = node.ask("CLUSTER", "SLOTS")
    return any(first <= slot <= last and master[2].decode() == own for first, last, master, *_ in ranges)


def _move(nodes: list[RespConnection], ids: list[str], slot: int, target: int) -> None:
    for node in nodes:
        node.ask("CLUSTER", "SETSLOT", slot, "NODE", ids[target])


@pytest.mark.parametrize(("size", "connections"), [(PAGE, 1), (2 << 20, 2)])
def test_many_bytes_come_over_two_connections(executor: Executor, call: Call, size: int, connections: int) -> None:
    """Each value in its region, and a missing one does not shift the others."""
    memory, keys = Memory(size), [b"%d" % number for number in range(8)]
    with redis_server() as server:
        connector = redis(executor, server.url)
        assert connector.open().is_ok()
        assert all(s.is_ok() for s in call(connector.mput(keys[:4], [memory[n] for n in range(4)])))
        assert call(connector.delete(keys[2])).is_ok()
        statuses = call(connector.mget(keys[:4], [memory[7 - n] for n in range(4)]))
        assert [status.is_ok() for status in statuses] == [True, True, False, True]
        assert statuses[2].is_not_found()
        for n in (0, 1, 3):
            assert np.array_equal(memory.row(memory.bytes, 7 - n), memory.original(n))
        assert np.array_equal(memory.row(memory.bytes, 5), memory.original(5))
        [node] = connector._nodes._servers.values()
        assert len(node._idle) == connections
        connector.close()


def test_a_time_to_live_is_given_to_the_server(executor: Executor, call: Call, server: Server) -> None:
    """With ttl_s a value has one, without it none."""
    memory = Memory(PAGE)
    connection = RespConnection(Address(port=server.port), Access())
    for ttl_s, left in ((0, range(-1, 0)), (1000, range(900, 1001))):
        connector = redis(executor, server.url, ttl_s=ttl_s)
        assert connector.open().is_ok()
        assert call(connector.put(b"key", memory[0])).is_ok()
        assert connection.ask("TTL", "key") in left
        connector.close()
    connection.close()


def test_two_hundred_batches_at_once_keep_their_answers_apart(server: Server, call: Call) -> None:
    """Many batches on few threads: nobody gets another's value."""
    memory = Memory(PAGE)
    flush(server)
    with ThreadPoolExecutor(8) as executor:
        connector = redis(executor, server.url)
        assert connector.open().is_ok()
        rows = [memory[number] for number in range(4)]
        assert all(s.is_ok() for s in call(connector.mput([b"%d" % n for n in range(4)], rows)))
        targets = [Memory(PAGE) for _ in range(200)]

        async def read() -> list[Any]:
            keys = [[b"%d" % ((n + k) % 4) for k in range(4)] for n in range(200)]
            wanted = [[target[k] for k in range(4)] for target in targets]
            return await asyncio.gather(*(connector.mget(k, w) for k, w in zip(keys, wanted, strict=True)))

        assert all(status.is_ok() for batch in call(read()) for status in batch)
        for n, target in enumerate(targets):
            for k in range(4):
                assert np.array_equal(target.row(target.bytes, k), memory.original((n + k) % 4))
        connector.close()


@pytest.mark.parametrize(
    ("url", "problem"),
    [
        ("http://127.0.0.1", "begins with one of"),
        ("redis://127.0.0.1:notaport", "port"),
        ("redis://127.0.0.1/notanumber", "number of a database"),
        ("unix://", "unix:///path"),
        ("rediss://127.0.0.1", "cannot be used"),
    ],
)
def test_urls_that_cannot_work_say_so_and_show_no_secret(executor: Executor, url: str, problem: str) -> None:
    """A ConfigError that tells what is wrong; of the URL it shows nothing that may be a password."""
    secret = url.replace("://", "://user:hunter2@") if "unix" not in url else url
    with pytest.raises(ConfigError, match=problem) as caught:
        redis(executor, secret, tls_ca="/nonexistent/ca.crt")
    assert "hunter2" not in str(caught.value)


@pytest.mark.parametrize(
    ("key", "slot"), [(b"foo", 12182), (b"{user1000}.following", 3443), (b"foo{}{bar}", 8363), (b"{}", 15257)]
)
def test_slots_are_those_of_the_specification(key: bytes, slot: int) -> None:
    """Values that `CLUSTER KEYSLOT` of a real server gives."""
    assert slot_of(key) == slot


@pytest.mark.parametrize(
    ("size", "sent"), [(64 << 10, [8]), (1 << 20, [4, 1, 1, 1, 1]), (2 << 20, [2] + [1] * 6), (8 << 20, [1] * 8)]
)
def test_few_bytes_are_asked_for_ahead(monkeypatch: pytest.MonkeyPatch, size: int, sent: list[int]) -> None:
    """A server copies every value as soon as it is asked for: as many as 4 MiB are due, one if it is larger."""
    steps: list[Any] = []

    class Recorded:
        def __init__(self, *_: Any) -> None:
            self.interrupt = self.close = lambda: None

        def send(self, buffers: Any) -> None:
            steps.append(len(buffers))

        def reply_into(self, view: memoryview, least: int) -> int:
            steps.append("answer")
            return len(view)

    monkeypatch.setattr(redis_nodes, "RespConnection", Recorded)
    view = memoryview(bytearray(size))
    server = redis_nodes.Server(Address(), Access())
    requests = [Request(b"%d" % i, [b"GET"], view=view) for i in range(8)]
    assert server.ask(Batch(), requests) == [size] * 8
    assert [step for step in steps if step != "answer"] == sent
    assert steps.count("answer") == 8
    server.close()
