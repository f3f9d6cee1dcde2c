"""The protocol of Redis: what is sent is what the specification says, and no answer is too strange to survive."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvcache_factory.connector.resp import Access, Address, RespConnection, ServerError, command, set_command


@contextmanager
def answering(*pieces: bytes) -> Iterator[RespConnection]:
    """A connection to a server that sends *pieces*, one after another, and closes."""
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def serve() -> None:
            other, _ = listener.accept()
            with other:
                other.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                for piece in pieces:
                    other.sendall(piece)

        thread = threading.Thread(target=serve)
        thread.start()
        connection = RespConnection(Address(port=listener.getsockname()[1]), Access(timeout_s=30.0))
        try:
            yield connection
        finally:
            connection.close()
            thread.join()


def test_commands_are_arrays_of_strings() -> None:
    """As written in the specification."""
    assert command("GET", b"k\0") == b"*2\r\n$3\r\nGET\r\n$2\r\nk\0\r\n"
    assert b"".join(set_command(b"key", memoryview(b"value"))) == command("SET", "key", "value")
    assert b"".join(set_command(b"key", memoryview(b"value"), 90)) == command("SET", "key", "value", "EX", 90)


def test_every_kind_of_answer() -> None:
    """Text, errors, numbers, strings, nothing, and arrays of them."""
    with answering(b"+OK\r\n-OOM full\r\n") as connection:
        assert connection.reply() == "OK"
        error = connection.reply()
        assert isinstance(error, ServerError)
        assert error.code == "OOM"
    with answering(b":-7\r\n$3\r\na\r\n\r\n$-1\r\n*3\r\n:1\r\n*-1\r\n*1\r\n$0\r\n\r\n") as connection:
        assert connection.reply() == -7
        assert connection.reply() == b"a\r\n"
        assert connection.reply() is None
        assert connection.reply() == [1, None, [b""]]


@pytest.mark.parametrize("cut", range(1, 12))
def test_an_answer_may_arrive_in_any_pieces(cut: int) -> None:
    """A value lands where it belongs, wherever the network cuts it, and nothing of the next answer is lost."""
    data = b"$5\r\nvalue\r\n:1\r\n"
    with answering(data[:cut], data[cut:]) as connection:
        target = bytearray(7)
        assert connection.reply_into(memoryview(target)[1:6]) == 5
        assert bytes(target) == b"\0value\0"
        assert connection.reply() == 1


def test_a_value_of_another_length_is_read_away() -> None:
    """The target is as it was, and the next answer is in its place."""
    with answering(b"$5\r\nvalue\r\n$-1\r\n-ERR no\r\n+OK\r\n") as connection:
        target = bytearray(4)
        assert connection.reply_into(memoryview(target)) == 5
        assert target == bytes(4)
        assert connection.reply_into(memoryview(target)) == -1
        assert isinstance(connection.reply_into(memoryview(target)), ServerError)
        assert connection.reply() == "OK"


@pytest.mark.parametrize(
    "answer",
    [
        b"$99999999999999999999\r\n",
        b"$70000000\r\n",
        b"*2000000\r\n",
        b"$x\r\n",
        b"$--1\r\n",
        b":\r\n",
        b"*1\r\n" * 20,
        b"!nonsense\r\n",
        b"x" * 100_000,
        b"",
        b"$5\r\nval",
    ],
    ids=lambda answer: repr(answer[:24]),
)
def test_what_no_server_says_is_a_failure_of_the_connection(answer: bytes) -> None:
    """Nothing is allocated for it, nothing hangs, nothing else is raised."""
    with answering(answer) as connection, pytest.raises(ConnectionError):
        connection.reply()


@given(st.binary(max_size=200))
def test_any_bytes_are_an_answer_or_a_failure_of_the_connection(data: bytes) -> None:
    """Whatever a server sends."""
    ours, theirs = socket.socketpair()
    connection = RespConnection.__new__(RespConnection)
    connection.address, connection._socket, connection._tls = Address(), ours, False
    with ours, theirs:
        theirs.sendall(data)
        theirs.shutdown(socket.SHUT_WR)
        try:
            while True:
                connection.reply()
        except ConnectionError:
            pass
