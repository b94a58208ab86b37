"""A set of listening sockets and their connections, from the first accept to the last byte."""

from __future__ import annotations

import asyncio
import logging
import socket
from collections.abc import Sequence
from typing import Any, Final

from uvicorn.config import Config
from uvicorn.server import ServerState

from headrace.server.connection import ConnectionLimits, bind

# Longer than nginx's upstream keep-alive (60 s), so that it is the proxy who closes an idle connection.
KEEP_ALIVE_S: Final = 75
_BACKLOG: Final = 2048


class Listener:
    """Serves an ASGI application on sockets that are already open.

    Args:
        app: the ASGI application.
        sockets: bound TCP or Unix sockets; owned by the listener from now on.
        limits: shared limits of the connections.
    """

    def __init__(self, app: Any, sockets: Sequence[socket.socket], limits: ConnectionLimits) -> None:
        self.limits = limits
        self._sockets = list(sockets)
        self._state = ServerState()
        self._servers: list[asyncio.Server] = []
        # Our edge answers and logs every fault; what uvicorn has to say besides is noise that a client can cause.
        for name in ("uvicorn.error", "uvicorn.access"):
            logging.getLogger(name).disabled = True
        self._config = Config(
            app,
            loop="none",
            http=bind(limits),
            ws="none",
            lifespan="off",
            log_config=None,
            access_log=False,
            proxy_headers=False,
            server_header=False,
            date_header=False,
            timeout_keep_alive=KEEP_ALIVE_S,
            interface="asgi3",
        )

    async def start(self) -> None:
        """Accepts connections from now on."""
        self._config.load()
        loop = asyncio.get_running_loop()
        for sock in self._sockets:
            sock.setblocking(False)
            server = await loop.create_server(
                lambda: self._config.http_protocol_class(  # type: ignore[call-arg]  # uvicorn's own constructor
                    config=self._config, server_state=self._state, app_state={}
                ),
                sock=sock,
                backlog=_BACKLOG,
            )
            self._servers.append(server)

    @property
    def num_connections(self) -> int:
        """Connections open now."""
        return len(self.limits.open_connections)

    @property
    def num_exchanges(self) -> int:
        """Requests being answered now."""
        return len(self._state.tasks)

    def cut_stalled(self) -> int:
        """Cuts readers that have stalled too long; returns how many."""
        now_s = self.limits.clock.now_s()
        return sum(connection.cut_if_stalled(now_s) for connection in list(self.limits.open_connections))

    def drain(self) -> None:
        """Closes idle connections, and every other one with its present answer; new ones are answered and closed."""
        self.limits.is_draining = True
        for connection in list(self.limits.open_connections):
            connection.shutdown()

    def stop_accepting(self) -> None:
        """Closes the listening sockets here; the supervisor's stay open."""
        for server in self._servers:
            server.close()

    async def wait_ended(self) -> None:
        """Waits until no request is being answered any more."""
        while self._state.tasks:
            await asyncio.wait(set(self._state.tasks))

    def cut_all(self) -> None:
        """Drops every connection."""
        for connection in list(self.limits.open_connections):
            connection.transport.abort()
