"""Addresses of this machine, where its own name may mean a loopback address."""

from __future__ import annotations

import socket

from gptpar.system.interfaces import is_own_address, means_loopback, outward_interface


def test_a_machine_knows_its_addresses_whatever_its_name_means() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        assert not is_own_address("127.0.0.1", port)
    assert is_own_address("127.0.0.1", port)
    assert not is_own_address("192.0.2.1", 0) and not is_own_address("no.such.host.invalid", 0)
    assert means_loopback("127.0.1.1") and not means_loopback("192.0.2.1")
    assert outward_interface() in (None, *(name for _, name in socket.if_nameindex() if name != "lo"))
