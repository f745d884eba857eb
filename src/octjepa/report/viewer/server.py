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

from octjepa.errors import OctjepaError, UsageError
from octjepa.extras import to_install
from octjepa.report.gather import gather
from octjepa.report.viewer.scans import Scans

if TYPE_CHECKING:
    from starlette.applications import Starlette
    from starlette.requests import Request
    from starlette.responses import Response

HOST = "127.0.0.1"
_HEADERS = {
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; "
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
    """What is to be shown of a store, a run or a demo folder. Raises UsageError where that has no volumes."""
    contents = gather(source)
    if contents.store is None:
        told = "; ".join(one.why for one in contents.missing if one.part == "the store")
        raise UsageError(f"{source} has no store to show ({told}): give the store itself")
    if contents.store.table.empty:
        raise UsageError(f"the store {contents.store.location} holds no volume: `octjepa ingest` puts them in")
    encoder = None
    if contents.run is not None:
        from octjepa.checkpoint import load_encoder

        encoder = load_encoder(contents.run.path)
        contents.store.check_contract(encoder.recipe.preprocessing)
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
        return lambda request: Response(content, media_type=kind, headers=_HEADERS)

    def json_of(make: Callable[[], Any]) -> Callable[[Request], Response]:
        return lambda request: JSONResponse(make(), headers=_HEADERS)

    def of_volume(make: Callable[[str, Request], Any]) -> Callable[[Request], Any]:
        async def answer(request: Request) -> Response:
            volume_id = request.path_params["volume_id"]
            if volume_id not in scans.ids:
                return PlainTextResponse("no such volume", 404, headers=_HEADERS)
            try:
                made = await run_in_threadpool(make, volume_id, request)
            except (KeyError, IndexError):
                return PlainTextResponse("no such slice or layer", 404, headers=_HEADERS)
            except (OctjepaError, ValueError) as error:
                return PlainTextResponse(str(error), 500, headers=_HEADERS)
            if isinstance(made, bytes):
                return Response(made, media_type="image/png", headers=_HEADERS)
            return JSONResponse(made, headers=_HEADERS)

        return answer

    volume = "/volumes/{volume_id}"
    routes = [Route(path, page(*which)) for path, which in _PAGE.items()]
    routes += [
        Route("/about", json_of(scans.about)),
        Route("/volumes", json_of(scans.listing)),
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
    return Starlette(routes=routes, middleware=[hosts])
