"""``kvcache-factory cluster``: who belongs to a cluster, and which slots are whose."""

from __future__ import annotations

import re
import threading
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from typing import TYPE_CHECKING, Any

import click

from .output import emit, json_option

if TYPE_CHECKING:
    from ..cluster.administration import Administration
    from ..cluster.membership import Membership

VARIABLE = "AIBRIX_KV_CACHE_OL_META_SERVICE_{}"


def place(context: click.Context, option: click.Parameter, value: str) -> tuple[str, int]:
    """``host:port``, or ``[address]:port``."""
    match = re.fullmatch(r"\[?([^\[\]]+?)\]?:(\d{1,5})", value)
    if match is None or not 0 < int(match[2]) < 65536:
        raise click.BadParameter(f"{value!r} is no address and port; write host:port")
    return match[1], int(match[2])


def fields(context: click.Context, option: click.Parameter, values: tuple[str, ...]) -> dict[str, Any]:
    """``name=value`` with a JSON value, or a text."""
    import msgspec

    found: dict[str, Any] = {}
    for value in values:
        name, is_there, text = value.partition("=")
        if not name or not is_there:
            raise click.BadParameter(f"{value!r}: write name=value")
        try:
            found[name] = msgspec.json.decode(text)
        except msgspec.DecodeError:
            found[name] = text
    return found


def with_meta_service(command: Callable[..., None]) -> Callable[..., None]:
    """Options that say where the membership is; by default what the variables say."""
    for option in (
        click.option("--key", envvar=VARIABLE.format("CLUSTER_META_KEY"), help="Key of the membership."),
        click.option("--url", envvar=VARIABLE.format("URL"), help="Where the meta service is."),
        click.option("--backend", envvar=VARIABLE.format("BACKEND"), help="REDIS or ETCD."),
    ):
        command = option(command)
    return command


@contextmanager
def administration(
    backend: str | None, url: str | None, key: str | None, slots: int | None = None
) -> Iterator[Administration]:
    """The cluster that the options name."""
    from ..cluster.administration import Administration
    from ..cluster.membership import DEFAULT_SLOTS
    from ..cluster.meta_service import meta_service

    for name, variable, value in (("--backend", "BACKEND", backend), ("--url", "URL", url)):
        if not value:
            raise click.UsageError(f"give {name}, or set {VARIABLE.format(variable)}")
    if not key:
        raise click.UsageError(f"give --key, or set {VARIABLE.format('CLUSTER_META_KEY')}")
    with closing(meta_service(backend or "", url or "")()) as meta:
        yield Administration(meta, key, slots or DEFAULT_SLOTS)


@click.group(epilog="Example: kvcache-factory cluster status --key kvcache_nodes")
def cluster() -> None:
    """Change and show the membership of a cluster, which its clients read from a meta service."""


@cluster.command(epilog="Example: kvcache-factory cluster join 10.0.0.1:12345 --heartbeat 10")
@click.argument("server", callback=place, metavar="HOST:PORT")
@with_meta_service
@click.option(
    "--field", "more", multiple=True, callback=fields, metavar="NAME=VALUE", help="An option for its connector."
)
@click.option("--slots", type=click.IntRange(1, 1 << 20), help="Slots of a cluster that is new (4096).")
@click.option(
    "--heartbeat",
    "ttl_s",
    type=click.IntRange(1, 3600),
    metavar="SECONDS",
    help="Stay, and renew this often enough; when this process is killed, the server is taken out.",
)
@json_option
def join(
    server: tuple[str, int],
    backend: str | None,
    url: str | None,
    key: str | None,
    more: dict[str, Any],
    slots: int | None,
    ttl_s: int | None,
    as_json: bool,
) -> None:
    """Add the server HOST:PORT, and give it its share of the slots.

    With --heartbeat the command goes on: it keeps the server's heartbeat alive and takes out others whose heartbeat has
    stopped.  Ended with Ctrl-C or SIGTERM it takes its own server out, too.
    """
    with administration(backend, url, key, slots) as admin:
        if ttl_s is None:
            admin.expect_no_beat(*server)
        else:
            admin.beat(*server, ttl_s)
        show("join", admin, admin.join(*server, more), as_json)
        if ttl_s is not None:
            keep_alive(admin, server, more, ttl_s)


def keep_alive(admin: Administration, server: tuple[str, int], more: dict[str, Any], ttl_s: int) -> None:
    """Beat three times within *ttl_s* seconds until somebody says stop; then leave."""
    import signal

    from ..errors import KVCacheError

    stop = threading.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda *_: stop.set())
    while not stop.wait(ttl_s / 3):
        try:
            admin.beat(*server, ttl_s)
            membership, dead = admin.rebalance()
            for gone in dead:
                click.echo(f"{gone} does not answer any more; its slots have been given to others", err=True)
            if server not in [(node.addr, node.port) for node in membership.nodes]:
                admin.join(*server, more)  # somebody took it out while it could not be heard
        except KVCacheError as error:
            click.echo(f"kvcache-factory: {error}; trying again", err=True)
    admin.leave(*server)


@cluster.command(epilog="Example: kvcache-factory cluster leave 10.0.0.1:12345")
@click.argument("server", callback=place, metavar="HOST:PORT")
@with_meta_service
@json_option
def leave(server: tuple[str, int], backend: str | None, url: str | None, key: str | None, as_json: bool) -> None:
    """Take the server HOST:PORT out and give its slots to the others."""
    with administration(backend, url, key) as admin:
        show("leave", admin, admin.leave(*server), as_json)


@cluster.command(epilog="Example: kvcache-factory cluster status --json")
@with_meta_service
@json_option
def status(backend: str | None, url: str | None, key: str | None, as_json: bool) -> None:
    """Show servers, their slots and heartbeats; the exit code is 1 when a slot has no owner or a heart has stopped."""
    with administration(backend, url, key) as admin:
        rows = show("status", admin, admin.read(), as_json)
    if not rows:
        click.echo("nobody has joined yet: kvcache-factory cluster join HOST:PORT", err=True)
    if not rows or any(row["alive"] is False for row in rows) or sum(row["slots"] for row in rows) < rows[0]["of"]:
        click.get_current_context().exit(1)


@cluster.command(epilog="Example: kvcache-factory cluster rebalance")
@with_meta_service
@json_option
def rebalance(backend: str | None, url: str | None, key: str | None, as_json: bool) -> None:
    """Take out servers whose heartbeat has stopped and spread the slots evenly, moving as few as that takes."""
    with administration(backend, url, key) as admin:
        membership, dead = admin.rebalance()
        for gone in dead:
            click.echo(f"{gone} was taken out", err=True)
        show("rebalance", admin, membership, as_json)


def show(command: str, admin: Administration, membership: Membership, as_json: bool) -> list[dict[str, Any]]:
    """A row for each server."""
    beats = admin.heartbeats()
    rows: list[dict[str, Any]] = [
        {
            "server": node.place,
            "slots": sum(r.end - r.start + 1 for r in node.slots),
            "of": membership.total_slots,
            "ranges": len(node.slots),
            "alive": beats.get(node.place),
            "version": membership.version,
        }
        for node in membership.nodes
    ]
    emit(f"cluster {command}", rows, as_json=as_json, title="Cluster")
    return rows
