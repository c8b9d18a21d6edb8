"""What stands for ``python``: asks :mod:`tests.e2e.quick_python` for a fork that runs these words, and ends like it."""

import json
import os
import socket
import sys

address, python, me, *asked_for = sys.argv[1:]
words = asked_for[asked_for[:1] == ["-u"] :]
if not (words[:2] == ["-m", "gptpar"] or words and words[0].endswith(".py")):
    os.execv(python, [python, *asked_for])
with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as server:
    server.connect(address)
    asked = {"words": words, "executable": me, "folder": os.getcwd(), "environment": dict(os.environ)}
    socket.send_fds(server, [json.dumps(asked).encode()], [1, 2])
    code = int(server.recv(64) or 1)
if code < 0:
    os.kill(os.getpid(), -code)
sys.exit(code)
