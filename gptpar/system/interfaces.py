"""The addresses and network interfaces of this machine, where its own name may mean a loopback address."""

from __future__ import annotations

import contextlib
import fcntl
import socket
import struct

SIOCGIFADDR = 0x8915  # Linux, netdevice(7): the IPv4 address of an interface


def is_own_address(host: str, port: int) -> bool:
    """Whether a host is this machine and the port is free: whether a server could listen there."""
    for family, kind, _, _, address in _resolved(host, port):
        with contextlib.suppress(OSError), socket.socket(family, kind) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind(address)
            return True
    return False


def means_loopback(host: str) -> bool:
    """Whether a host's name means an address that other machines cannot reach, as ``127.0.1.1`` on Debian."""
    return any(str(address[0]).startswith("127.") for *_, address in _resolved(host, 0))


def outward_interface() -> str | None:
    """The network interface of this machine with an IPv4 address for others; ``None``: there is none, or several."""
    found = [name for _, name in socket.if_nameindex() if not _address_of(name).startswith(("127.", "-"))]
    return found[0] if len(found) == 1 else None


def _address_of(interface: str) -> str:
    with contextlib.suppress(OSError), socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket:
        request = struct.pack("256s", interface.encode()[:15])
        return socket.inet_ntoa(fcntl.ioctl(any_socket.fileno(), SIOCGIFADDR, request)[20:24])
    return "-"


def _resolved(host: str, port: int) -> list[tuple[int, int, int, str, tuple[str, int]]]:
    try:
        return socket.getaddrinfo(host.strip("[]"), port, type=socket.SOCK_STREAM)  # type: ignore[return-value]
    except (OSError, UnicodeError):
        return []
