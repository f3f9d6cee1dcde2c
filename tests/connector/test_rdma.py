"""Which RDMA device and GID a connection uses, from what a system would say of its devices."""

from __future__ import annotations

from pathlib import Path

import pytest

from kvcache_factory.connector.rdma import Device, choose_device, parse_devices
from kvcache_factory.errors import ConfigError


def device(system: Path, name: str, *gids: tuple[str, str], port: int = 1) -> None:
    """A device with GIDs (address, type) as Linux shows them."""
    directory = system / name / "ports" / str(port)
    for number, (address, kind) in enumerate(gids):
        for part, text in (("gids", address), ("gid_attrs/types", kind)):
            (directory / part).mkdir(parents=True, exist_ok=True)
            (directory / part / str(number)).write_text(f"{text}\n")


@pytest.fixture
def system(tmp_path: Path) -> Path:
    """Two devices of a RoCE network, IPv4 addresses in the second half of their GIDs, and one without a link."""
    for number in (0, 1):
        device(
            tmp_path,
            f"mlx5_{number}",
            ("fe80:0000:0000:0000:0000:00ff:fe00:0001", "IB/RoCE v1"),
            ("fe80:0000:0000:0000:0000:00ff:fe00:0001", "RoCE v2"),
            (f"0000:0000:0000:0000:0000:ffff:0a00:000{number + 1}", "IB/RoCE v1"),
            (f"0000:0000:0000:0000:0000:ffff:0a00:000{number + 1}", "RoCE v2"),
        )
    device(tmp_path, "mlx5_2", ("0000:0000:0000:0000:0000:0000:0000:0000", "RoCE v2"))
    return tmp_path


def test_devices_are_read_with_and_without_an_index() -> None:
    """As documented, and with a plain number."""
    assert parse_devices("mlx5_0:gid0, mlx5_1:3,mlx5_2") == [Device("mlx5_0", 0), Device("mlx5_1", 3), Device("mlx5_2")]
    assert parse_devices("") == []


@pytest.mark.parametrize("text", ["mlx5_0:gid", "mlx5_0:x", ":3", "a:1:2"])
def test_a_list_that_is_none_is_refused(text: str) -> None:
    """The error shows how it is written."""
    with pytest.raises(ConfigError, match="NAME:gidINDEX"):
        parse_devices(text)


@pytest.mark.parametrize(
    ("text", "rank", "link_type", "addr_range", "expected"),
    [
        ("mlx5_1:gid7", 0, "Ethernet", "::/0", Device("mlx5_1", 7)),
        ("mlx5_1", 0, "Ethernet", "10.0.0.0/8", Device("mlx5_1", 3)),
        ("mlx5_9", 0, "Ethernet", "::/0", Device("mlx5_9", None)),
        ("", 0, "Ethernet", "::/0", Device("mlx5_0", 1)),
        ("", 0, "IB", "::/0", Device("mlx5_0", 0)),
        ("", 1, "Ethernet", "10.0.0.0/24", Device("mlx5_1", 3)),
        ("", 2, "Ethernet", "0.0.0.0/0", Device("mlx5_0", 3)),
        ("", 0, "Ethernet", "10.0.0.2/32", Device("mlx5_1", 3)),
    ],
)
def test_the_device_and_its_address(
    system: Path, text: str, rank: int, link_type: str, addr_range: str, expected: Device
) -> None:
    """Explicit wins; ranks go round; RoCE v2 on Ethernet; ranges of both families; IPv4 hosts are in ::/0."""
    assert choose_device(text, rank, 1, link_type, addr_range, system) == expected


@pytest.mark.parametrize("addr_range", ["192.168.0.0/16", "2001:db8::/32"])
def test_no_device_in_the_range_says_what_to_do(system: Path, addr_range: str) -> None:
    """Names the range and the ways out."""
    with pytest.raises(ConfigError, match="visible_dev_list, widen the range, or use connection_type TCP"):
        choose_device("", 0, 1, "Ethernet", addr_range, system)


def test_a_range_that_is_none_is_refused(system: Path) -> None:
    """It is named."""
    with pytest.raises(ConfigError, match="is no CIDR"):
        choose_device("", 0, 1, "Ethernet", "10.0.0.0/99", system)
