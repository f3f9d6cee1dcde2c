"""Which RDMA device, and which of its GIDs, a connection uses; read from what the system says of them."""

from __future__ import annotations

import ipaddress
import re
from pathlib import Path
from typing import Any

import msgspec

from ..errors import ConfigError

SYSTEM = Path("/sys/class/infiniband")
_DEVICE = re.compile(r"(?P<name>[^:,\s]+)(?::(?:gid)?(?P<gid>\d+))?")


class Device(msgspec.Struct, frozen=True):
    """An RDMA device, and the index of the GID to use; None lets the client choose."""

    name: str
    gid_index: int | None = None


def parse_devices(text: str) -> list[Device]:
    """The devices of ``"mlx5_0:gid3,mlx5_1"``; a number alone is an index too.  Raises ConfigError."""
    devices = []
    for part in filter(None, (part.strip() for part in text.split(","))):
        match = _DEVICE.fullmatch(part)
        if match is None:
            raise ConfigError(
                f"visible_dev_list: {part!r} is no device; write NAME or NAME:gidINDEX, as in mlx5_0:gid3"
            )
        devices.append(Device(match["name"], None if match["gid"] is None else int(match["gid"])))
    return devices


def choose_device(text: str, rank: int, port: int, link_type: str, addr_range: str, system: Path = SYSTEM) -> Device:
    """The device of process *rank*: of those in *text*, or with none of all that have a GID in *addr_range*.

    Raises ConfigError for a range that is none, and where there is no device to choose from.
    """
    network = _network(addr_range)
    given = parse_devices(text)
    devices = given or [Device(path.name) for path in _sorted(system)]
    found = [
        device if device.gid_index is not None else Device(device.name, index)
        for device in devices
        if device.gid_index is not None
        or (index := _gid_index(system / device.name / "ports" / str(port), link_type, network)) is not None
        or given
    ]
    if not found:
        raise ConfigError(
            f"no RDMA device here has an address in {addr_range} on port {port} ({link_type}); "
            "name the devices in visible_dev_list, widen the range, or use connection_type TCP"
        )
    return found[rank % len(found)]


def _network(text: str) -> Any:
    try:
        return ipaddress.ip_network(text, strict=False)
    except ValueError as error:
        raise ConfigError(f"the RDMA address range {text!r} is no CIDR ({error}); write 10.0.0.0/8 or ::/0") from None


def _gid_index(port: Path, link_type: str, network: Any) -> int | None:
    """The first GID in the network; on Ethernet of RoCE v2, which alone is routed."""
    for path in _sorted(port / "gids"):
        try:
            address = ipaddress.IPv6Address(path.read_text().strip())
            kind = (port / "gid_attrs" / "types" / path.name).read_text().strip()
        except (OSError, ValueError):  # an entry that is not in use
            continue
        if int(address) and _within(address, network) and (link_type != "Ethernet" or kind == "RoCE v2"):
            return int(path.name)
    return None


def _within(address: ipaddress.IPv6Address, network: Any) -> bool:
    """IPv4 hosts have GIDs of mapped addresses: such a one is in ranges of both kinds."""
    mapped = address.ipv4_mapped
    return address in network if network.version == 6 else mapped is not None and mapped in network


def _sorted(directory: Path) -> list[Path]:
    try:
        return sorted(directory.iterdir(), key=lambda path: (len(path.name), path.name))
    except OSError:
        return []
