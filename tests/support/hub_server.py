"""A stand-in for the Hugging Face Hub on this machine: repositories of files, in memory."""

from __future__ import annotations

import base64
import hashlib
import json
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Thread
from urllib.parse import unquote, urlsplit

COMMIT = "a" * 40


class Hub(ThreadingHTTPServer):
    """`repositories`: name -> path -> content; `private`: the names that were created so."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.repositories: dict[str, dict[str, bytes]] = {}
        self.private: set[str] = set()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"


class _Handler(BaseHTTPRequestHandler):
    server: Hub

    def log_message(self, format: str, *args: object) -> None:
        """Nothing."""

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        path = urlsplit(self.path).path
        if path == "/api/repos/create":
            requested = json.loads(body)
            name = "/".join(filter(None, (requested.get("organization"), requested["name"])))
            self.server.repositories.setdefault(name, {})
            self.server.private |= (
                {name} if requested.get("private") or requested.get("visibility") == "private" else set()
            )
            self._json({"url": f"{self.server.url}/{name}", "name": name, "id": name})
        elif path == "/api/validate-yaml":
            self._json({"errors": [], "warnings": []})
        elif "/preupload/" in path:
            files = json.loads(body)["files"]
            self._json(
                {"files": [{"path": file["path"], "uploadMode": "regular", "shouldIgnore": False} for file in files]}
            )
        elif "/commit/" in path:
            name = "/".join(path.split("/")[3:5])
            repository = self.server.repositories[name]
            for line in map(json.loads, body.splitlines()):
                if line["key"] == "file":
                    repository[line["value"]["path"]] = base64.b64decode(line["value"]["content"])
            self._json({"commitUrl": f"{self.server.url}/{name}/commit/{COMMIT}", "commitOid": COMMIT, "success": True})
        else:
            self._missing()

    def do_HEAD(self) -> None:
        self.do_GET()

    def do_GET(self) -> None:
        parts = unquote(urlsplit(self.path).path).strip("/").split("/")
        api = parts[:2] == ["api", "models"]
        name = "/".join(parts[2:4] if api else parts[:2])
        repository = self.server.repositories.get(name)
        if repository is None:
            self._missing("RepoNotFound")
        elif api and "tree" in parts:
            self._json(
                [
                    {"type": "file", "path": path, "size": len(data), "oid": _etag(data)}
                    for path, data in repository.items()
                ]
            )
        elif api:
            siblings = [{"rfilename": path} for path in repository]
            self._json({"id": name, "modelId": name, "sha": COMMIT, "siblings": siblings, "private": False, "tags": []})
        elif parts[2:3] == ["resolve"] and "/".join(parts[4:]) in repository:
            data = repository["/".join(parts[4:])]
            self._reply(200, data, {"ETag": f'"{_etag(data)}"', "X-Repo-Commit": COMMIT})
        else:
            self._missing("EntryNotFound")

    def _json(self, content: object) -> None:
        self._reply(200, json.dumps(content).encode(), {"Content-Type": "application/json"})

    def _missing(self, code: str = "") -> None:
        self._reply(404, b"{}", {"X-Error-Code": code} if code else {})

    def _reply(self, status: int, data: bytes, headers: dict[str, str]) -> None:
        self.send_response(status)
        for name, value in {**headers, "Content-Length": str(len(data))}.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(data)


def _etag(data: bytes) -> str:
    return hashlib.sha1(data, usedforsecurity=False).hexdigest()


@contextmanager
def hub_server() -> Iterator[Hub]:
    """A stand-in while the block runs."""
    hub = Hub()
    thread = Thread(target=hub.serve_forever, args=(0.05,), daemon=True)
    thread.start()
    try:
        yield hub
    finally:
        hub.shutdown()
        hub.server_close()
        thread.join()
