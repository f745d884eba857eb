"""The viewer's server in a thread of this process, on a port of its own."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager

from octjepa.viewer.scans import Scans
from octjepa.viewer.server import app


@contextmanager
def served(scans: Scans) -> Iterator[str]:
    """The address at which `scans` can be asked for, without a slash at its end."""
    import uvicorn

    with socket.socket() as listening:
        listening.bind(("127.0.0.1", 0))
        listening.listen()
        server = uvicorn.Server(uvicorn.Config(app(scans), lifespan="off", log_level="warning"))
        thread = threading.Thread(target=server.run, kwargs={"sockets": [listening]})
        thread.start()
        yield f"http://127.0.0.1:{listening.getsockname()[1]}"
        server.should_exit = True
        thread.join()
