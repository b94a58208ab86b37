"""A front in forty lines: accepts on the inherited sockets and answers with its pid. For tests of the supervisor.

Its environment says how it takes SIGTERM: ``end`` (the default), ``cut`` (exit 75 at the second) or ``ignore``.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import sys
import threading

MANNERS = sys.argv[1]


def answer(listener: socket.socket) -> None:
    while True:
        client, _ = listener.accept()
        client.sendall(str(os.getpid()).encode())
        client.close()


def main() -> None:
    launch = json.load(os.fdopen(int(sys.argv[sys.argv.index("--launch-fd") + 1])))
    terms = []

    def on_term(*_: object) -> None:
        terms.append(1)
        if MANNERS == "end" or (MANNERS == "cut" and len(terms) == 2):
            os._exit(0 if MANNERS == "end" else 75)

    signal.signal(signal.SIGTERM, on_term)
    for fd in launch["listen_fds"]:
        listener = socket.socket(fileno=fd)
        listener.setblocking(True)
        threading.Thread(target=answer, args=(listener,), daemon=True).start()
    while True:
        signal.pause()


main()
