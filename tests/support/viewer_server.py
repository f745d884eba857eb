"""The viewer's server in a thread of this process, on a port of its own, and a gate that disturbs its answers."""

from __future__ import annotations

import asyncio
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from octjepa.viewer.scans import Scans
from octjepa.viewer.server import app

if TYPE_CHECKING:
    from starlette.types import Receive, Scope, Send


class Gate:
    """Lies between the page and the server. All three rules are functions of a request's path.

    `holds`: the request waits while this is true. `fails`: the answer is an error. `turns`: the path that is answered.
    """

    def __init__(self, scans: Scans) -> None:
        self.app = app(scans)
        self.open()

    def open(self) -> None:
        """Lets every request through as it is."""
        self.holds: Callable[[str], bool] = lambda path: False
        self.fails: Callable[[str], bool] = lambda path: False
        self.turns: Callable[[str], str] = lambda path: path

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        from starlette.responses import PlainTextResponse

        path = str(scope["path"])
        while self.holds(path):
            await asyncio.sleep(0.02)
        if self.fails(path):
            await PlainTextResponse("out of order", 500)(scope, receive, send)
        else:
            await self.app({**scope, "path": self.turns(path), "raw_path": self.turns(path).encode()}, receive, send)


@contextmanager
def served(scans: Scans, gate: Gate | None = None, key: str = "") -> Iterator[str]:
    """The address at which `scans` can be asked for, without a slash at its end; through `gate` if there is one.

    `key` is that of requests which write.
    """
    import uvicorn

    with socket.socket() as listening:
        listening.bind(("127.0.0.1", 0))
        listening.listen()
        server = uvicorn.Server(uvicorn.Config(gate or app(scans, key), lifespan="off", log_level="warning"))
        thread = threading.Thread(target=server.run, kwargs={"sockets": [listening]})
        thread.start()
        yield f"http://127.0.0.1:{listening.getsockname()[1]}"
        if gate is not None:
            gate.open()
        server.should_exit = True
        thread.join()
