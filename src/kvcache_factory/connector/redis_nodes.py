"""Which server a key belongs to, and pipelines of requests to all of them at once.

A standalone server is a cluster of one that owns every slot.  https://redis.io/docs/latest/operate/oss_and_stack/reference/cluster-spec/
"""

from __future__ import annotations

import binascii
import contextlib
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from typing import Any, TypeAlias

import msgspec

from .blocking import Call, NotReady
from .resp import Access, Address, RespConnection, ServerError, command

SLOTS = 16384
_ROUNDS = 5  # redirections that one request may take
_LOOK_S = 1.0  # least time between two questions about who owns what
_LEFT_ALONE_S = (0.5, 30.0)  # a server of a cluster that failed is not asked: after the first time, and at most
_MOST_DUE = 4 << 20  # bytes of values that are asked for ahead: the server makes a copy of each as soon as it is
_ENOUGH = 256 << 10  # bytes that are not held back for more
_TWO_LANES = 8 << 20  # bytes of values from one server that come over two connections, sooner than over one
_ONE_LANE_S = 30.0  # a server that let us have no second connection is not asked for one
_MOST_SERVERS = 16  # asked at the same time
_MOVING = ("MOVED", "ASK", "TRYAGAIN")

Buffers: TypeAlias = list[bytes | memoryview]
Answer: TypeAlias = Any
"""A reply, the length of a value that was received, or an exception as a value."""
Part: TypeAlias = "tuple[tuple[Server | None, bool], list[int]]"
"""A server, whether it has to be told that a slot is on its way to it, and which requests are for it."""


class Away(ConnectionError):
    """The owner of the key cannot be asked, while other servers of its cluster can."""


class LeftAlone(ConnectionError):
    """The server has failed a moment ago and is not asked now."""


class Request(msgspec.Struct):
    """One command on a key; with *view*, its answer is a value that belongs there, of at least *least* bytes.

    *buffers* may be made when it is sent, and raise NotReady; *came* is called when its value is there.
    """

    key: bytes
    buffers: Buffers | Callable[[], Buffers]
    view: memoryview | None = None
    least: int = 0
    came: Callable[[], object] | None = None

    def made(self) -> Buffers:
        """What is sent."""
        return self.buffers() if callable(self.buffers) else self.buffers

    @property
    def due(self) -> int:
        """Bytes of values that its answer brings at most."""
        return len(self.view) if self.view is not None else 0


class Server:
    """The connections to one server; as many as batches are on their way at once.

    One of several, *in_cluster*, is left alone for a while when it fails, so that it costs the others no time.
    """

    def __init__(self, address: Address, access: Access) -> None:
        self.address = address
        self.in_cluster = False
        self.failures = 0
        self._access = access
        self._idle: list[RespConnection] = []
        self._lock = threading.Lock()
        self._down_until_s = 0.0
        self._narrow_until_s = 0.0
        self._closed = False

    def ask(self, call: Call, requests: Sequence[Request], asking: bool = False) -> list[Answer]:
        """Send all requests as one pipeline; what had no answer has the exception that says why."""
        answers: list[Answer] = []
        try:
            connection, used = self._take()
            try:
                self._pipeline(call, connection, requests, asking, answers)
            except TimeoutError:
                raise
            except OSError:
                if not used or answers or call.cancelled:
                    raise
                # It was closed while nobody used it, by a restart perhaps: that says nothing about the server now.
                self.forget()
                connection, _ = self._take()
                self._pipeline(call, connection, requests, asking, answers)
            self.failures = 0
        except OSError as error:
            if not isinstance(error, LeftAlone) and not call.cancelled:
                self._failed()
            answers += [error] * (len(requests) - len(answers))
        except ServerError as error:  # it answers, but does not let us in
            answers += [error] * (len(requests) - len(answers))
        return answers

    @property
    def is_narrow(self) -> bool:
        """Whether it may be asked over one connection only."""
        return time.monotonic() < self._narrow_until_s

    def narrow(self) -> None:
        """It answered over one of two connections only: that is enough, and says nothing against it."""
        self._narrow_until_s = time.monotonic() + _ONE_LANE_S
        self.failures = 0

    def _failed(self) -> None:
        first_s, most_s = _LEFT_ALONE_S
        self._down_until_s = time.monotonic() + min(first_s * 2**self.failures, most_s)
        self.failures = min(self.failures + 1, 16)

    def _pipeline(
        self, call: Call, connection: RespConnection, requests: Sequence[Request], asking: bool, answers: list[Answer]
    ) -> None:
        whole = False
        call.on_cancel(connection.interrupt)
        try:
            window = _Window(connection, requests, [command("ASKING")] if asking else [])
            for at, request in enumerate(requests):
                window.send(at)
                if at == window.sent:
                    break
                if asking:
                    connection.reply()
                answers.append(_answer(connection, request))
                window.due -= request.due
            answers += [window.stopped] * (len(requests) - len(answers))
            whole = True
        finally:
            call.on_cancel(None)
            self._give(connection, whole and not call.cancelled)

    def _take(self) -> tuple[RespConnection, bool]:
        with self._lock:
            if self._closed:
                raise ConnectionError(f"the connector to {self.address} is closed")
            if self.in_cluster and self.failures and time.monotonic() < self._down_until_s:
                raise LeftAlone(f"{self.address} has failed a moment ago")
            if self._idle:
                return self._idle.pop(), True
        return RespConnection(self.address, self._access), False

    def _give(self, connection: RespConnection, usable: bool) -> None:
        with self._lock:
            if usable and not self._closed:
                self._idle.append(connection)
                return
        connection.close()

    def forget(self) -> None:
        """Close the connections that nobody uses."""
        with self._lock:
            idle, self._idle = self._idle, []
        for connection in idle:
            connection.close()

    def close(self) -> None:
        """Close; connections in use are closed when their batch ends."""
        self._closed = True
        self.forget()


class _Window:
    """The requests of a pipeline, sent as early as they are ready and few bytes are due."""

    def __init__(self, connection: RespConnection, requests: Sequence[Request], extra: Buffers) -> None:
        self.sent = 0
        self.due = 0
        self.stopped: NotReady | None = None
        self._connection = connection
        self._requests = requests
        self._extra = extra

    def send(self, at: int) -> None:
        """Send the request number *at*, if it will ever be ready, and what may be sent ahead of its answer."""
        buffers: Buffers = []
        size = 0
        for request in self._requests[self.sent :]:
            if self.stopped or (self.sent > at and self.due + request.due > _MOST_DUE):
                break
            try:
                made = request.made()
            except NotReady as error:
                self.stopped = error
                break
            buffers += [*self._extra, *made]
            size += sum(map(len, made))
            self.sent += 1
            self.due += request.due
            if size >= _ENOUGH:
                self._connection.send(buffers)
                buffers, size = [], 0
        if buffers:
            self._connection.send(buffers)


class Nodes:
    """The servers, and the slots each of them owns."""

    def __init__(self, seeds: Sequence[Address], access: Access) -> None:
        self._seeds = list(seeds)
        self._access = access
        self._lock = threading.Lock()
        self._servers: dict[Address, Server] = {}
        self._owners: list[Server | None] = []  # of each slot; empty where the server is alone
        self._stale = True
        self._looked_s = -_LOOK_S  # so that the first look is never too early
        self._pool: ThreadPoolExecutor | None = None

    def open(self) -> None:
        """Learn who owns what from the first of the seeds that answers; raises what the last one said."""
        self._pool = ThreadPoolExecutor(_MOST_SERVERS, thread_name_prefix="kvcache-factory-redis")
        try:
            self._look()
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """Close all connections; idempotent."""
        with self._lock:
            servers, self._servers, self._owners = list(self._servers.values()), {}, []
            self._stale, self._looked_s = True, -_LOOK_S
            pool, self._pool = self._pool, None
        for server in servers:
            server.close()
        if pool is not None:
            pool.shutdown(wait=False)

    def ask(self, call: Call, requests: Sequence[Request]) -> list[Answer]:
        """The answers to all requests, following redirections; failures of single servers are values."""
        if self._stale:
            with contextlib.suppress(OSError, ServerError):
                self._look()
        answers: list[Answer] = [None] * len(requests)
        todo: dict[tuple[Server | None, bool], list[int]] = defaultdict(list)
        for i, request in enumerate(requests):
            todo[self._owner(request.key), False].append(i)
        for _ in range(_ROUNDS):
            self._round(call, requests, todo, answers)
            todo = self._redirected(answers)
            if not todo or call.cancelled:
                break
        return self._apart(answers)

    def _apart(self, answers: list[Answer]) -> list[Answer]:
        """Failures of single servers told apart from the failure of all of them."""
        servers = set(self._owners)
        if not any(server is not None and not server.failures for server in servers):
            return answers
        return [Away(str(answer)) if isinstance(answer, OSError) else answer for answer in answers]

    def _round(self, call: Call, requests: Sequence[Request], todo: Any, answers: list[Answer]) -> None:
        """Ask each server its part; where two connections to one are too many, both parts come over one of them."""
        parts = _lanes(list(todo.items()), requests)
        self._at_once(call, parts, requests, answers)
        if len(parts) > len(todo) and not call.cancelled and (lost := _lost_by_one(parts, answers)):
            (server, asking), _ = parts[0]
            assert server is not None, "nobody has no lanes"
            server.narrow()
            self._at_once(call, [((server, asking), lost)], requests, answers)
        if self._owners and any(isinstance(answer, OSError) for answer in answers):
            self._stale = True

    def _at_once(self, call: Call, parts: list[Part], requests: Sequence[Request], answers: list[Answer]) -> None:
        """Ask all parts at the same time; the first of them on this thread."""
        later: list[tuple[list[int], Future[list[Answer]]]] = []
        calls, pool = [call] if len(parts) == 1 else call.split(len(parts)), self._pool
        if pool is None:
            raise ConnectionError("the connector is closed")
        try:
            for part, ((server, asking), rows) in list(zip(calls, parts, strict=True))[1:]:
                later.append((rows, pool.submit(_ask, server, part, [requests[i] for i in rows], asking)))
            (server, asking), rows = parts[0]
            _put(answers, rows, _ask(server, calls[0], [requests[i] for i in rows], asking))
        finally:
            wait([future for _, future in later])  # whatever was raised: none may touch its memory when this has ended
        for rows, future in later:
            _put(answers, rows, future.result())
        call.on_cancel(None)

    def _redirected(self, answers: list[Answer]) -> dict[tuple[Server | None, bool], list[int]]:
        """Requests to be sent elsewhere, by server; what a MOVED says about its slot is kept."""
        todo: dict[tuple[Server | None, bool], list[int]] = defaultdict(list)
        for i, answer in enumerate(answers):
            if not isinstance(answer, ServerError) or answer.code not in _MOVING[:2] or not self._owners:
                continue
            slot, place = str(answer).split()[1:3]
            host, _, port = place.rpartition(":")
            with self._lock:
                server = self._server(Address(host or self._seeds[0].host, int(port)))
                if answer.code == "MOVED":
                    self._owners[int(slot)] = server
                    self._stale = True
            todo[server, answer.code == "ASK"].append(i)
        return todo

    def _owner(self, key: bytes) -> Server | None:
        owners = self._owners
        return owners[slot_of(key)] if owners else self._servers.get(self._seeds[0])

    def _look(self) -> None:
        """Read who owns what; at most once in a while."""
        now = time.monotonic()
        if now - self._looked_s < _LOOK_S:
            return
        self._looked_s = now
        problem: Exception = ConnectionError("no server to ask")
        for address in dict.fromkeys([*self._seeds, *self._servers]):
            with self._lock:
                server = self._server(address)
            request = Request(b"", [command("CLUSTER", "SLOTS")])
            (answer,) = server.ask(Call(), [request])
            if isinstance(answer, list) and answer:
                self._learn(address, answer)
                return
            if isinstance(answer, ServerError) and "cluster support disabled" in str(answer):
                self._seeds, self._stale = [address], False
                return
            problem = answer if isinstance(answer, Exception) else ConnectionError(f"{address} owns no slots yet")
        raise problem

    def _learn(self, asked: Address, ranges: list[Any]) -> None:
        owners: list[Server | None] = [None] * SLOTS
        with self._lock:
            for first, last, master, *_ in ranges:
                if not 0 <= first <= last < SLOTS:
                    raise ConnectionError(f"{asked} names slots {first} to {last} of {SLOTS}")
                host = (master[0] or b"").decode() or asked.host
                server = self._server(Address(host, int(master[1])))
                server.in_cluster = True
                owners[first : last + 1] = [server] * (last + 1 - first)
            self._owners = owners
            self._stale = False

    def _server(self, address: Address) -> Server:
        server = self._servers.get(address)
        if server is None:
            server = self._servers[address] = Server(address, self._access)
        return server


def slot_of(key: bytes) -> int:
    """The slot of a key: CRC-16 of it, or of what stands between the first braces in it."""
    begin = key.find(b"{")
    end = key.find(b"}", begin + 1)
    if begin >= 0 and end > begin + 1:
        key = key[begin + 1 : end]
    return binascii.crc_hqx(key, 0) % SLOTS


def _lanes(parts: list[Part], requests: Sequence[Request]) -> list[Part]:
    """The same parts, or two of one that brings many bytes: every other value, so that they come about in order."""
    ((server, asking), rows), *others = parts
    many = len(rows) > 1 and sum(requests[i].due for i in rows) >= _TWO_LANES
    wide = many and not others and server is not None and not server.is_narrow
    return [((server, asking), rows[0::2]), ((server, asking), rows[1::2])] if wide else parts


def _lost_by_one(lanes: list[Part], answers: Sequence[Answer]) -> list[int]:
    """What one of two lanes could not bring, where the other had an answer to everything."""

    def is_lost(answer: Answer) -> bool:  # that a server has too many clients comes in place of an answer
        return isinstance(answer, OSError) or (isinstance(answer, ServerError) and answer.code == "ERR")

    lost = [[i for i in rows if is_lost(answers[i])] for _, rows in lanes]
    return [] if all(lost) else lost[0] or lost[1]


def _ask(server: Server | None, call: Call, requests: Sequence[Request], asking: bool) -> list[Answer]:
    if server is None:
        return [ConnectionError("no server of the cluster owns the slot of this key")] * len(requests)
    return server.ask(call, requests, asking)


def _put(answers: list[Answer], rows: Sequence[int], values: Sequence[Answer]) -> None:
    for i, value in zip(rows, values, strict=True):
        answers[i] = value


def _answer(connection: RespConnection, request: Request) -> Answer:
    if request.view is None:
        return connection.reply()
    size = connection.reply_into(request.view, request.least)
    if request.came is not None and isinstance(size, int) and request.least <= size <= len(request.view):
        request.came()
    return size
