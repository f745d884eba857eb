"""An HTTP proxy before an emulated object store: spoils the answers it is told to spoil and counts the requests."""

from __future__ import annotations

import http.client
import socket
import struct
import threading
import time
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any


@dataclass
class Fault:
    """`kind`: a status as text, or delay, reset, truncate, shorten, corrupt, lost. `truncate` cuts the body below its
    Content-Length, `shorten` lowers that too, `lost` lets the store do the work and loses the answer."""

    kind: str
    method: str = "GET"
    where: str = ""  # part of the path and query
    times: int = 1
    after: int = 0  # so many such requests come through first

    def strikes(self, method: str, path: str) -> bool:
        if not (self.times and method == self.method and self.where in path):
            return False
        if self.after:
            self.after -= 1
            return False
        self.times -= 1
        return True


@dataclass
class FaultyProxy:
    """Stands before the server at `port`; `faults` are used up in order, `requests` are (method, path and query)."""

    port: int
    delay_seconds: float = 1.6
    faults: list[Fault] = field(default_factory=list)
    requests: list[tuple[str, str]] = field(default_factory=list)

    def __enter__(self) -> FaultyProxy:
        proxy = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def log_message(self, *_: Any) -> None:
                pass

        for method in ("GET", "HEAD", "PUT", "POST", "DELETE", "PATCH"):
            setattr(Handler, f"do_{method}", lambda client: proxy.handle(client))
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = True
        self._server.handle_error = lambda *_: None  # type: ignore[method-assign]  # clients hang up, that is the point
        self._lock = threading.Lock()
        self.url = f"http://127.0.0.1:{self._server.server_port}"
        self._thread = threading.Thread(target=self._server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True)
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._server.shutdown()
        self._thread.join()
        self._server.server_close()

    def bodies_sent(self, name: str) -> int:
        """How often the content of the object called `name` was asked for."""
        return sum(
            method == "GET" and path.partition("?")[0].endswith(name) and ("/o/" not in path or "alt=media" in path)
            for method, path in self.requests
        )

    def _fault(self, method: str, path: str) -> str:
        with self._lock:
            self.requests.append((method, path))
            for fault in self.faults:
                if fault.strikes(method, path):
                    return fault.kind
        return ""

    def handle(self, client: BaseHTTPRequestHandler) -> None:
        body = self._body(client)
        kind = self._fault(client.command, client.path)
        if kind == "reset":
            return self._hang_up(client)
        if kind == "delay":
            time.sleep(self.delay_seconds)
        if kind.isdigit():
            return self._answer(client, int(kind), [], b"told by the proxy: AKIASECRETSECRET")
        if "ifGenerationMatch=0" in client.path and self._is_there(client.path, body):
            return self._answer(client, 412, [], b"")
        status, headers, content = self._forward(client.command, client.path, dict(client.headers), body)
        if kind == "lost":
            return self._hang_up(client)
        if kind == "corrupt":
            content = bytes([content[0] ^ 255]) + content[1:]
            headers = [pair for pair in headers if not pair[0].lower().startswith(("x-amz-checksum", "x-goog-hash"))]
        if kind == "shorten":
            content = content[: len(content) // 2]
        self._answer(client, status, headers, content, cut=kind == "truncate")

    @staticmethod
    def _body(client: BaseHTTPRequestHandler) -> bytes:
        if "chunked" not in client.headers.get("Transfer-Encoding", ""):
            return client.rfile.read(int(client.headers.get("Content-Length") or 0))
        parts = []
        while size := int(client.rfile.readline().split(b";")[0], 16):
            parts.append(client.rfile.read(size))
            client.rfile.readline()
        client.rfile.readline()
        return b"".join(parts)

    def _forward(
        self, method: str, path: str, headers: dict[str, str], body: bytes
    ) -> tuple[int, list[tuple[str, str]], bytes]:
        retained = {k: v for k, v in headers.items() if k.lower() not in {"transfer-encoding", "connection", "expect"}}
        if body or method in {"PUT", "POST"}:
            retained["Content-Length"] = str(len(body))
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=20)
        try:
            connection.request(method, path, body, retained)
            answer = connection.getresponse()
            return answer.status, answer.getheaders(), answer.read()
        finally:
            connection.close()

    def _is_there(self, path: str, body: bytes) -> bool:
        """The GCS emulator does not know ifGenerationMatch=0, "only where there is none": the proxy looks for it."""
        name = body.split(b'"name": "', 1)[1].split(b'"', 1)[0].decode()
        bucket = path.split("/b/", 1)[1].split("/", 1)[0]
        return self._forward("GET", f"/storage/v1/b/{bucket}/o/{name.replace('/', '%2F')}", {}, b"")[0] == 200

    @staticmethod
    def _answer(
        client: BaseHTTPRequestHandler, status: int, headers: list[tuple[str, str]], content: bytes, cut: bool = False
    ) -> None:
        client.send_response(status)
        length = str(len(content))
        for name, value in headers:
            if client.command == "HEAD" and name.lower() == "content-length":
                length = value
            if name.lower() not in {"content-length", "transfer-encoding", "connection", "date", "server"}:
                client.send_header(name, value)
        client.send_header("Content-Length", length)
        client.end_headers()
        if client.command != "HEAD":
            client.wfile.write(content[: len(content) // 2] if cut else content)
        if cut:
            client.close_connection = True

    @staticmethod
    def _hang_up(client: BaseHTTPRequestHandler) -> None:
        client.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        client.close_connection = True
        client.connection.shutdown(socket.SHUT_RD)
        client.connection.close()
