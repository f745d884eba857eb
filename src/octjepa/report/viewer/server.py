"""The server of the viewer: on the loopback address alone, for requests to it by that name alone, and only to read.

Another machine cannot reach it, and a page of another site can neither read its answers nor pass for it under a name
that resolves to here (the Host header is checked). The page runs its own script and nothing else (its policy says so).
"""

from __future__ import annotations

import socket
from collections.abc import Callable
from importlib.resources import files
from pathlib import Path
from typing import TYPE_CHECKING, Any

from octjepa.errors import CheckpointError, OctjepaError, UsageError
from octjepa.extras import to_install
from octjepa.report.gather import gather
from octjepa.report.viewer.scans import Scans
from octjepa.store.contract import contract_differences

if TYPE_CHECKING:
    from starlette.applications import Starlette
    from starlette.requests import Request
    from starlette.responses import Response
    from starlette.types import ASGIApp, Message, Receive, Scope, Send

HOST = "127.0.0.1"
_HEADERS = {
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:; "
    "connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cache-Control": "no-store",
}
_PAGE = {
    "/": ("index.html", "text/html"), "/viewer.js": ("viewer.js", "text/javascript"),
    "/viewer.css": ("viewer.css", "text/css"),
}  # fmt: skip


def serve(source: str | Path, port: int, ready: Callable[[str], None]) -> None:
    """Shows `source` until a signal comes; calls `ready(url)` once it can be asked. Port 0 is any free one.

    Raises UsageError: the source is none of these, has no store, the port is taken, or the extra is not installed.
    """
    try:
        import starlette  # noqa: F401 -- asked for here, before any work
        import uvicorn
    except ImportError:
        raise UsageError(f"the viewer needs the libraries of an extra: {to_install('viewer')}") from None
    application = app(scans_of(source))
    with socket.socket() as listening:
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            listening.bind((HOST, port))
            listening.listen()
        except OSError as error:
            reason = error.strerror or str(error)
            raise UsageError(f"port {port} cannot be had ({reason}): give another --port, or 0 for any") from None
        ready(f"http://{HOST}:{listening.getsockname()[1]}/")
        config = uvicorn.Config(application, lifespan="off", access_log=False, log_level="warning")
        uvicorn.Server(config).run(sockets=[listening])


def scans_of(source: str | Path) -> Scans:
    """What is to be shown of a store, a run, a fine-tuning or a demo folder.

    Raises UsageError where that has no volumes. Without its encoder (no checkpoint yet, another contract) the eyes are
    shown all the same, and the page says why.
    """
    contents = gather(source)
    if contents.store is None:
        told = "; ".join(one.why for one in contents.missing if one.part == "the store")
        named = "" if contents.made is None else f" at {contents.made.about.get('store')}, as it names it"
        raise UsageError(f"{source} has no store to show{named} ({told}): give the store itself")
    if contents.store.table.empty:
        raise UsageError(f"the store {contents.store.location} holds no volume: `octjepa ingest` puts them in")
    if contents.kind == "store":
        return Scans(contents.store, None)
    trained = contents.run or contents.tuning
    if trained is None:
        gone = "; ".join(f"{one.part}: {one.why}" for one in contents.missing if one.part == "the run")
        return Scans(contents.store, None, gone or f"a {contents.kind} has no token maps and masks of its own")
    from octjepa.checkpoint import load_encoder

    try:
        encoder = load_encoder(trained.path)
        if differences := contract_differences(contents.store.preprocessing, encoder.recipe):
            raise UsageError(f"its store has another contract ({'; '.join(differences)})")
    except (CheckpointError, UsageError) as error:
        return Scans(contents.store, None, str(error))
    return Scans(contents.store, encoder)


def app(scans: Scans) -> Starlette:
    """The routes. A fault in one answer is told in it, without a traceback, and the others go on."""
    from starlette.applications import Starlette
    from starlette.concurrency import run_in_threadpool
    from starlette.middleware import Middleware
    from starlette.middleware.trustedhost import TrustedHostMiddleware
    from starlette.responses import JSONResponse, PlainTextResponse, Response
    from starlette.routing import Route

    def page(name: str, kind: str) -> Callable[[Request], Response]:
        content = files("octjepa.report.viewer").joinpath("static", name).read_bytes()
        return lambda request: Response(content, media_type=kind)

    async def answered(make: Callable[[], Any]) -> Response:
        try:
            made = await run_in_threadpool(make)
        except (KeyError, IndexError):
            return PlainTextResponse("no such slice or layer", 404)
        except (OctjepaError, ValueError) as error:
            return PlainTextResponse(str(error), 500)
        return Response(made, media_type="image/png") if isinstance(made, bytes) else JSONResponse(made)

    def of_all(make: Callable[[], Any]) -> Callable[[Request], Any]:
        async def answer(request: Request) -> Response:
            return await answered(make)

        return answer

    def of_volume(make: Callable[[str, Request], Any]) -> Callable[[Request], Any]:
        async def answer(request: Request) -> Response:
            volume_id = request.path_params["volume_id"]
            if volume_id not in scans.ids:
                return PlainTextResponse("no such volume", 404)
            return await answered(lambda: make(volume_id, request))

        return answer

    volume = "/volumes/{volume_id}"
    routes = [Route(path, page(*which)) for path, which in _PAGE.items()]
    routes += [
        Route("/about", of_all(scans.about)),
        Route("/volumes", of_all(scans.listing)),
        Route(f"{volume}/band", of_volume(lambda name, request: scans.band(name))),
        Route(f"{volume}/en_face.png", of_volume(lambda name, request: scans.en_face_png(name))),
        Route(
            f"{volume}/slices/{{number:int}}.png",
            of_volume(lambda name, request: scans.slice_png(name, request.path_params["number"])),
        ),
        Route(
            f"{volume}/grid/{{layer}}.png",
            of_volume(lambda name, request: scans.grid_png(name, request.path_params["layer"])),
        ),
    ]
    hosts = Middleware(TrustedHostMiddleware, allowed_hosts=[HOST, "localhost"], www_redirect=False)
    return Starlette(routes=routes, middleware=[Middleware(_Headers), hosts])


class _Headers:
    """Adds `_HEADERS` to every answer, refusals too."""

    def __init__(self, app: ASGIApp) -> None:
        self.app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async def with_headers(message: Message) -> None:
            if message["type"] == "http.response.start":
                message["headers"] = [
                    *message.get("headers", []),
                    *((name.lower().encode(), value.encode()) for name, value in _HEADERS.items()),
                ]
            await send(message)

        await self.app(scope, receive, with_headers)
