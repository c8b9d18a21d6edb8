"""What stands for ``python``: asks :mod:`tests.e2e.quick_python` for a fork that runs these words, and ends like it."""

import json
import os
import socket
import sys

address, python, me, *words = sys.argv[1:]
if not (words[:2] == ["-m", "gptpar"] or words and words[0].endswith(".py")):
    os.execv(python, [python, *words])
with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as server:
    server.connect(address)
    asked = {"words": words, "executable": me, "folder": os.getcwd(), "environment": dict(os.environ)}
    socket.send_fds(server, [json.dumps(asked).encode()], [1, 2])
    code = int(server.recv(64) or 1)
if code < 0:
    os.kill(os.getpid(), -code)
sys.exit(code)
