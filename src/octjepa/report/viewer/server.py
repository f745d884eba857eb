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

from octjepa.errors import CheckpointError, OctjepaError, UsageError, install_command
from octjepa.report.contents import read_contents
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
    """Shows `source` until a signal comes; calls `ready(url)` once it accepts requests. Port 0 is any free one.

    Raises UsageError: the source is none of these, has no store, the port is taken, or the extra is not installed.
    """
    try:
        import starlette  # noqa: F401 -- checked before any work
        import uvicorn
    except ImportError:
        raise UsageError(f"the viewer needs the libraries of an extra: {install_command('viewer')}") from None
    application = app(open_scans(source))
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


def open_scans(source: str | Path) -> Scans:
    """The volumes of a store, a run, a fine-tuning or a demo folder, with the encoder where there is one.

    Raises UsageError where the source has no volumes. Without its encoder (no checkpoint yet, another contract) the
    eyes are shown all the same, and the page says why.
    """
    contents = read_contents(source)
    training = contents.training
    if contents.store is None:
        reasons = "; ".join(missing.reason for missing in contents.missing_parts("the store"))
        named = "" if training is None else f" at {training.about.get('store')}, as it names it"
        raise UsageError(f"{source} has no store to show{named} ({reasons}): give the store itself")
    if contents.store.table.empty:
        raise UsageError(f"the store {contents.store.location} holds no volume: `octjepa ingest` puts them in")
    if contents.kind == "store":
        return Scans(contents.store, None)
    if training is None or contents.kind == "segmentation":
        reasons = "; ".join(f"{missing.part}: {missing.reason}" for missing in contents.missing_parts("the run"))
        return Scans(contents.store, None, reasons or f"a {contents.kind} has no token maps and masks of its own")
    from octjepa.checkpoint import load_encoder

    try:
        encoder = load_encoder(training.path)
        if differences := contract_differences(contents.store.preprocessing, encoder.recipe):
            raise UsageError(f"its store has another contract ({'; '.join(differences)})")
    except (CheckpointError, UsageError) as error:
        return Scans(contents.store, None, str(error))
    return Scans(contents.store, encoder)


def app(scans: Scans) -> Starlette:
    """The routes. An error in one answer is reported in it, without a traceback, and the others still work."""
    from starlette.applications import Starlette
    from starlette.concurrency import run_in_threadpool
    from starlette.middleware import Middleware
    from starlette.middleware.trustedhost import TrustedHostMiddleware
    from starlette.responses import JSONResponse, PlainTextResponse, Response
    from starlette.routing import Route

    def static(name: str, media_type: str) -> Callable[[Request], Response]:
        content = files("octjepa.report.viewer").joinpath("static", name).read_bytes()
        return lambda request: Response(content, media_type=media_type)

    def answer(make: Callable[..., Any]) -> Callable[[Request], Any]:
        """`make(**path parameters)` as PNG or JSON."""

        async def respond(request: Request) -> Response:
            volume_id = request.path_params.get("volume_id")
            if volume_id is not None and volume_id not in scans.ids:
                return PlainTextResponse("no such volume", 404)
            try:
                result = await run_in_threadpool(make, **request.path_params)
            except (KeyError, IndexError):
                return PlainTextResponse("no such slice or layer", 404)
            except (OctjepaError, ValueError) as error:
                return PlainTextResponse(str(error), 500)
            return Response(result, media_type="image/png") if isinstance(result, bytes) else JSONResponse(result)

        return respond

    answers: dict[str, Callable[..., Any]] = {
        "/about": scans.about,
        "/volumes": scans.listing,
        "/volumes/{volume_id}/band": scans.band,
        "/volumes/{volume_id}/central": scans.central,
        "/volumes/{volume_id}/en_face.png": lambda volume_id: scans.en_face_png(volume_id),
        "/volumes/{volume_id}/slices/{number:int}.png": scans.slice_png,
        "/volumes/{volume_id}/grid/{layer}.png": lambda volume_id, layer: scans.grid_png(volume_id, layer),
    }
    routes = [Route(path, static(*file)) for path, file in _PAGE.items()]
    routes += [Route(path, answer(make)) for path, make in answers.items()]
    hosts = Middleware(TrustedHostMiddleware, allowed_hosts=[HOST, "localhost"], www_redirect=False)
    return Starlette(routes=routes, middleware=[Middleware(_Headers), hosts])


class _Headers:
    """Adds `_HEADERS` to every response, errors included."""

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
