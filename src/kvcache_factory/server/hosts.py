"""Names under which a server on this machine alone may be asked: its own, never one that somebody's DNS points here.

Starlette's middleware for this has read addresses of IPv6 in different ways, and in early versions not at all.
"""

from __future__ import annotations

import re
from ipaddress import IPv6Address, ip_address

from starlette.datastructures import Headers
from starlette.responses import PlainTextResponse
from starlette.types import ASGIApp, Receive, Scope, Send

_HOST = re.compile(r"(?:\[([0-9A-Fa-f:.]+)\]|([^\s:@/\[\]]+))(?::[0-9]{1,5})?")


def is_local(name: str) -> bool:
    """Whether *name*, without brackets, is ``localhost`` or an address of the loopback interface."""
    if name.lower() == "localhost":
        return True
    try:
        address = ip_address(name)
    except ValueError:
        return False
    mapped = address.ipv4_mapped if isinstance(address, IPv6Address) else None
    return (mapped or address).is_loopback


class LocalNames:
    """ASGI middleware: status 400 for a request whose ``Host`` is not :func:`is_local`.

    A page of somebody else can make a browser ask a name of its own that resolves to 127.0.0.1 or ::1, and read the
    answer; the name is then in ``Host``.
    """

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            match = _HOST.fullmatch(Headers(scope=scope).get("host", ""))
            if match is None or not is_local(match[1] or match[2]):
                refusal = PlainTextResponse("this server is asked as localhost, 127.0.0.1 or [::1]", status_code=400)
                await refusal(scope, receive, send)
                return
        await self._app(scope, receive, send)
