"""The store where the workers of one machine meet; it listens on the loopback address alone."""

from __future__ import annotations

import os
import socket
from pathlib import Path

from gptpar.errors import GptparError

LOOPBACK = "127.0.0.1"


class LocalStore:
    """A TCPStore in the launcher, for one start of the workers. It ends when nobody refers to it.

    torch's own store listens on every address of the machine unless it is given a socket.

    Args:
        address: to listen on.
        port: 0 takes a free one.

    Raises:
        GptparError: the port is another program's.
    """

    def __init__(self, address: str = LOOPBACK, port: int = 0):
        from torch.distributed import TCPStore  # a second, which a launcher's tests need not pay for

        family = socket.AF_INET6 if ":" in address else socket.AF_INET
        try:
            listener = socket.create_server((address, port), family=family, backlog=1024)
        except OSError as error:
            raise GptparError(
                f"the workers cannot meet at {address}:{port} ({error.strerror}): choose another --master-port, or "
                "leave --master-addr and --master-port out."
            ) from error
        self.address, self.port = address, listener.getsockname()[1]
        self._store = TCPStore(
            address, self.port, is_master=True, wait_for_workers=False, master_listen_fd=listener.detach()
        )

    def environment(self) -> dict[str, str]:
        """torchrun's variables that tell a worker where the store is and that it is running.

        Others make gloo and NCCL listen on this machine alone, unless the user has chosen an interface.
        """
        is_here = self.address == LOOPBACK and Path("/sys/class/net/lo").exists()
        names = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME") if is_here else ()
        return {
            "MASTER_ADDR": self.address,
            "MASTER_PORT": str(self.port),
            "TORCHELASTIC_USE_AGENT_STORE": "True",
            **{name: os.environ.get(name, "lo") for name in names},
        }
