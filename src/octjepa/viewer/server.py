"""The viewer's web server: on the loopback address, for requests to that host name only.

Input: the volumes (`Scans`). Output: the page's static files, and PNG or JSON answers about one volume each. Another
machine cannot reach the server. A page of another site cannot read its answers, and the Host header is checked, so a
foreign name that resolves to this machine is refused. The content security policy lets the page run only its own
script. Every response about a volume names the volume in the header `ANSWER_OF`: the page drops an answer about a
volume that it no longer shows, so that no value appears under the name of another eye.

The server reads only, unless the user names a folder for corrections. It then also accepts boundaries that were
corrected by hand, from a request that has the key of the printed address (which other users of the machine do not
know), that comes from the page itself (`Origin`), and that is JSON of a limited size. `octjepa.viewer.corrections`
checks the content and writes only into that folder.
"""

from __future__ import annotations

import hmac
import json
import secrets
import socket
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from importlib.resources import files
from inspect import Parameter, signature
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from octjepa.errors import CheckpointError, ContractError, OctjepaError, UsageError, VolumeRejected, install_command
from octjepa.ingest.native_files import NativeFiles, existing_scans, folders_near
from octjepa.ingest.remembered_sources import model_of
from octjepa.read.reader import SpacingOption
from octjepa.record import Record
from octjepa.remote import is_remote
from octjepa.report.contents import Contents, read_contents
from octjepa.store.contract import contract_differences
from octjepa.tasks.segmenter.retained_layers import LayerCache
from octjepa.viewer.corrections import Corrections
from octjepa.viewer.listing import person_numbers
from octjepa.viewer.live import LiveRun
from octjepa.viewer.misread import CasePredictions
from octjepa.viewer.neighbours import Neighbours
from octjepa.viewer.opened_source import opened_source
from octjepa.viewer.scan_layers import ScanLayers
from octjepa.viewer.scans import Model, Scans
from octjepa.viewer.voxel_classes import VoxelClasses, head_reader

if TYPE_CHECKING:
    from starlette.requests import Request
    from starlette.responses import Response
    from starlette.types import ASGIApp, Message, Receive, Scope, Send

    from octjepa.store import Store

HOST = "127.0.0.1"
PREDICTIONS, EMBEDDINGS = "predictions.parquet", "embeddings.parquet"  # in the folder that is shown
Table = TypeVar("Table")
_HEADERS = {
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data: blob:; "
    "connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cache-Control": "no-store",
}
ANSWER_OF = "X-Octjepa-Volume"  # the id of the volume that a response is about
KEY = "X-Octjepa-Key"  # the header of the key without which nothing is written
_MOST_BODY_BYTES = 8 << 20  # of a request that writes: eight boundaries of 65,000 columns
_NO_MODEL = "the adapted network that segmented these scans is gone: layers and fluid are those of the packaged network"
_JSON = "application/json"
_LARGEST = 10**9  # of a number in a request: no index or position in mm is greater
_SCRIPTS = (
    "viewer",
    "shown",
    "stored",
    "native",
    "native_drawing",
    "native_pointers",
    "native_sectors",
    "native_corrections",
    "boundary_edit",
    "live",
    "cases",
    "csv",
    "parts",
)
_PAGE = {
    "/": ("index.html", "text/html"),
    "/viewer.css": ("viewer.css", "text/css"),
    **{f"/{name}.js": (f"{name}.js", "text/javascript") for name in _SCRIPTS},
}


@dataclass(frozen=True)
class ShownWith:
    """The options that the user names next to the source.

    `scans` are the folders that were ingested, `labels` a folder of label volumes, `encoder` that of a store or head,
    `predictions` the test predictions of a probe, `embeddings` a table for nearest neighbours, `corrections` the folder
    in which boundaries that are corrected by hand are saved, `spacing_mm` (slice, depth, column) the spacing of scans
    that are read for the viewer; None for results of `octjepa segment` is what that command was given.
    """

    scans: Sequence[str] = ()
    labels: str | Path | None = None
    encoder: str | None = None
    predictions: Path | None = None
    embeddings: Path | None = None
    corrections: Path | None = None
    spacing_mm: SpacingOption = None


def serve(source: str | Path, port: int, ready: Callable[[str], None], shown_with: ShownWith = ShownWith()) -> None:
    """Shows `source` until a signal comes; calls `ready(url)` once it accepts requests. Port 0 is any free one.

    `source` may also be a scan, a folder of scans, or a folder that `octjepa segment` wrote: see `opened_source`.
    Raises UsageError: the source is none of these, has no store, the port is taken, the extra is not installed, or the
    folder of corrections cannot be made.
    """
    try:
        import starlette  # noqa: F401 -- both are checked before any work
        import uvicorn  # noqa: F401
    except ImportError:
        raise UsageError(f"the viewer needs the libraries of an extra: {install_command('viewer')}") from None
    named = shown_with
    corrections = None if named.corrections is None else Corrections(named.corrections)
    with opened_source(source, named.scans, named.spacing_mm) as from_source:
        model, notes = None if is_remote(source) else model_of(source), from_source.notes
        if model is not None and not model.is_dir():
            model, notes = None, (*notes, _NO_MODEL)
        opened = open_scans(
            from_source.shown,
            from_source.folders,
            named.labels,
            named.encoder,
            named.predictions,
            named.embeddings,
            model,
        )
        opened.add_notes(notes)
        opened.corrections = corrections
        key = "" if corrections is None else secrets.token_urlsafe(16)
        _listen(app(opened, key), port, ready, f"?key={key}" if key else "")


def _listen(application: ASGIApp, port: int, ready: Callable[[str], None], query: str) -> None:
    import uvicorn

    with socket.socket() as listening:
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            listening.bind((HOST, port))
            listening.listen()
        except OSError as error:
            reason = error.strerror or str(error)
            raise UsageError(f"port {port} is not available ({reason}): give another --port, or 0 for any") from None
        ready(f"http://{HOST}:{listening.getsockname()[1]}/{query}")
        config = uvicorn.Config(application, lifespan="off", access_log=False, log_level="warning")
        uvicorn.Server(config).run(sockets=[listening])


def open_scans(
    source: str | Path,
    scans: Sequence[str] = (),
    labels: str | Path | None = None,
    encoder: str | None = None,
    predictions: Path | None = None,
    embeddings: Path | None = None,
    model: Path | None = None,
) -> Scans:
    """The volumes of a store, a run, a fine-tuning, a segmentation or a demo folder, with the encoder it has.

    Raises UsageError where the source has no volumes, a folder of `scans` is absent, or `labels`, `encoder`,
    `predictions` or `embeddings` cannot be read. Without an encoder (no checkpoint yet, another contract) the eyes are
    still shown, and the page says why. `model` is the segmentation network that finds the layers, by default the
    packaged one.
    """
    contents = read_contents(source)
    training, store = contents.training, contents.store
    if store is None:
        reasons = "; ".join(missing.reason for missing in contents.missing_parts("the store"))
        named = "" if training is None else f" at {training.about.get('store')}, as it names it"
        raise UsageError(f"{source} has no store to show{named} ({reasons}): give the store itself")
    if store.table.empty:
        raise UsageError(f"the store {store.location} holds no volume: `octjepa ingest` puts them in")
    files = NativeFiles(existing_scans(scans), () if is_remote(store.location) else folders_near(Path(store.location)))
    head, live = None, None
    if training is not None and contents.kind == "segmentation":
        head = head_reader(contents.root, encoder)
    elif training is not None:
        live = LiveRun(training.path, contents.kind)
    encoders = partial(_model, contents, store, head, encoder)
    usable = head if head is not None and encoders()[1] is not None else None
    people, notes = person_numbers(store), []

    def table(read: Callable[..., Table], named: Path | None, beside: str) -> Table:
        """The result of `read` for the file that was named, or of that in the folder, if it can be read."""
        if named is None and (contents.root / beside).is_file():
            try:
                return read(contents.root / beside, people)
            except OctjepaError as error:
                notes.append(str(error))
        return read(named, people)

    cases, near = table(CasePredictions, predictions, PREDICTIONS), table(Neighbours, embeddings, EMBEDDINGS)
    opened = Scans(store, encoders, files, VoxelClasses(usable, labels), live, cases, near, notes)
    opened.layers = ScanLayers(LayerCache(model))
    return opened


def _model(contents: Contents, store: Store, head: Callable[[], Any] | None, named: str | None) -> Model:
    """(recipe, encoder, why there is no encoder) of what `contents` holds, or of the encoder that is `named`."""
    from octjepa.encoders import load_encoder

    if contents.kind == "store" and named is None:
        return None, None, ""
    training = contents.training
    source = named or (training.path if training is not None else None)
    if source is None:
        missing = contents.missing_parts("the run")
        return None, None, "; ".join(f"{part.part}: {part.reason}" for part in missing) or "there is no run"
    recipe = None if training is None else training.recipe
    try:
        encoder = head().encoder if head is not None else load_encoder(source)
        if differences := contract_differences(store.preprocessing, encoder.preprocessing):
            recipe = None
            raise UsageError(f"its store has another contract ({'; '.join(differences)})")
    except (CheckpointError, ContractError, UsageError) as error:
        if named is not None:
            raise UsageError(f"{error}") from None
        if recipe is not None and contract_differences(store.preprocessing, recipe.preprocessing):
            recipe = None
        return recipe, None, str(error)
    return encoder.recipe, encoder, ""


def app(scans: Scans, key: str = "") -> ASGIApp:
    """The routes as an ASGI application. A request that fails gets one line of text, and the others still work.

    `key` is that of requests which write; without a key nothing can be written.
    """
    from starlette.applications import Starlette
    from starlette.concurrency import run_in_threadpool
    from starlette.middleware import Middleware
    from starlette.middleware.trustedhost import TrustedHostMiddleware
    from starlette.responses import PlainTextResponse, Response
    from starlette.routing import Route

    def static(name: str, media_type: str) -> Callable[[Request], Response]:
        content = files("octjepa.viewer").joinpath("static", name).read_bytes()
        return lambda request: Response(content, media_type=media_type)

    def answer(make: Callable[..., Any], query: Mapping[str, Callable[[str], Any]]) -> Callable[[Request], Any]:
        """`make(**path parameters, **query)` as PNG or JSON; `query` names the parameters it takes and their types."""
        required = [
            name
            for name, parameter in signature(make).parameters.items()
            if name in query and parameter.default is Parameter.empty
        ]

        async def respond(request: Request) -> Response:
            volume_id = request.path_params.get("volume_id")
            if volume_id is not None and volume_id not in scans.ids:
                return PlainTextResponse("no such volume", 404)
            texts = {name: value for name, value in request.query_params.items() if name in query}
            if missing := [name for name in required if name not in texts]:
                return PlainTextResponse(f"the request lacks the parameter {missing[0]}", 400)
            try:
                values = {**request.path_params, **{name: query[name](value) for name, value in texts.items()}}
            except ValueError:
                return PlainTextResponse("a parameter is not a number", 400)
            if not all(_is_small(value) for value in values.values() if not isinstance(value, str)):
                return PlainTextResponse("a number is out of range", 400)
            try:
                result = await run_in_threadpool(make, **values)
                if isinstance(result, bytes):
                    return Response(result, media_type="image/png")
                return Response(_json(result), media_type=_JSON)
            except (KeyError, IndexError):
                return PlainTextResponse("no such slice or layer", 404)
            except (UsageError, VolumeRejected) as error:  # the files lack what was requested, or do not fit
                return PlainTextResponse(" ".join(str(error).split()), 422)
            except (OctjepaError, ValueError) as error:
                return PlainTextResponse(" ".join(str(error).split()), 500)

        return respond

    routes = [Route(path, static(*file)) for path, file in _PAGE.items()]
    routes += [Route(path, answer(make, query)) for path, (make, query) in answers(scans).items()]
    if scans.corrections is not None:
        saving = "/volumes/{volume_id}/native/corrections"
        routes.append(Route(saving, answer(scans.corrected, {})))
        routes.append(Route(f"{saving}/{{number:int}}", _writing(scans, key), methods=["POST", "DELETE"]))
    hosts = Middleware(TrustedHostMiddleware, allowed_hosts=[HOST, "localhost"], www_redirect=False)
    return _Headers(Starlette(routes=routes, middleware=[hosts]), scans.ids)


def _writing(scans: Scans, key: str) -> Callable[[Request], Any]:
    """Saves or removes the corrected boundaries of a B-scan."""
    from starlette.concurrency import run_in_threadpool
    from starlette.responses import PlainTextResponse, Response

    async def respond(request: Request) -> Response:
        if reason := _refusal(request, key):
            return PlainTextResponse(reason, 403)
        volume_id, number = request.path_params["volume_id"], request.path_params["number"]
        if volume_id not in scans.ids or not _is_small(number):
            return PlainTextResponse("no such volume or B-scan", 404)
        body = b""
        async for part in request.stream():
            body += part
            if len(body) > _MOST_BODY_BYTES:
                return PlainTextResponse(f"the request has more than {_MOST_BODY_BYTES >> 20} MiB", 413)
        try:
            sent = json.loads(body)
        except (ValueError, RecursionError):
            sent = None
        saves = request.method == "POST"
        if not isinstance(sent, dict) or (saves and sent.get("rows") is None):
            return PlainTextResponse('the request is not JSON: expected {"rows": eight lists}', 400)
        try:
            boundaries = sent["rows"] if saves else None
            saved = await run_in_threadpool(scans.correct, volume_id, number, boundaries)
            return Response(_json(saved), media_type=_JSON)
        except (KeyError, IndexError):
            return PlainTextResponse("no such B-scan", 404)
        except OctjepaError as error:
            return PlainTextResponse(" ".join(str(error).split()), 422)

    return respond


def _refusal(request: Request, key: str) -> str:
    """Why a request may not write; "" if it may. Only the page of the printed address may."""
    headers = request.headers
    if not key or not hmac.compare_digest(headers.get(KEY, "").encode(), key.encode()):
        return "open the viewer with the whole address that octjepa view printed: its key is missing here"
    if headers.get("Origin") != f"http://{headers.get('Host', '')}":
        return "the request comes from another page"
    if headers.get("Sec-Fetch-Site", "same-origin") != "same-origin":
        return "the request comes from another site"
    if headers.get("Content-Type", "").partition(";")[0].strip().lower() != _JSON:
        return "the request is not JSON"
    return ""


def _json(answer: object) -> bytes:
    """An answer as JSON: a record, or lists of records or numbers. Raises ValueError: it holds a NaN."""
    text = json.dumps(answer, default=Record.to_json, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
    return text.encode()


def _is_small(number: float) -> bool:
    return abs(number) <= _LARGEST  # False for NaN


def answers(scans: Scans) -> dict[str, tuple[Callable[..., Any], dict[str, Callable[[str], Any]]]]:
    """By path: the function that answers and the types of its query parameters."""
    volume, native = "/volumes/{volume_id}", "/volumes/{volume_id}/native"
    token: dict[str, Callable[[str], Any]] = {"token": int}
    text = dict.fromkeys(("search", "device", "split", "order", "around"), str)
    return {
        "/about": (scans.about, {}),
        "/live": (scans.live_answer, {}),
        "/misread": (scans.cases.misread, {"target": str}),
        "/volumes": (scans.volumes.page, {**text, "offset": int, "limit": int}),
        volume: (scans.volumes.facts, {}),
        f"{volume}/same_person": (scans.volumes.same_person, {}),
        f"{volume}/neighbours": (scans.neighbours.nearest, {}),
        f"{volume}/band": (scans.band, {}),
        f"{volume}/central": (scans.central, {}),
        f"{volume}/en_face.png": (lambda volume_id: scans.en_face_png(volume_id), {}),
        f"{volume}/slices/{{number:int}}.png": (scans.slice_png, {}),
        f"{volume}/grid/{{layer}}.png": (
            lambda volume_id, layer, token=-1: scans.grid_png(volume_id, layer, token),
            token,
        ),
        native: (scans.native_about, {}),
        f"{native}/first": (scans.first, {}),
        f"{native}/first.png": (scans.first_png, {}),
        f"{native}/face.png": (scans.native_face_png, {}),
        f"{native}/localizer.png": (scans.localizer_png, {}),
        f"{native}/layers": (scans.layer_state, {}),
        f"{native}/thickness.png": (scans.thickness_png, {"layer": str}),
        f"{native}/etdrs": (scans.etdrs, {"slice_index": float, "column": float, "layer": str}),
        f"{native}/surfaces/{{plane}}/{{index:int}}": (scans.surface_lines, {}),
        f"{native}/place/{{number:int}}/{{depth:int}}/{{column:int}}": (scans.position, {}),
        f"{native}/overlay/{{layer}}/{{number:int}}.png": (scans.overlay_png, token),
        f"{native}/classes/{{layer}}": (scans.legend, {}),
        f"{native}/{{plane}}/{{index:int}}.png": (scans.native_plane_png, {}),
    }


class _Headers:
    """Adds `_HEADERS` to every response, and `ANSWER_OF` to every response about one of the volumes `ids`.

    It wraps the whole application, because Starlette answers an unexpected error outside the middleware of the app.
    """

    def __init__(self, app: ASGIApp, ids: Collection[str]) -> None:
        self.app, self.ids = app, ids

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        headers = dict(_HEADERS)
        _, *parts = str(scope.get("path", "")).split("/")
        if parts[:1] == ["volumes"] and len(parts) > 1 and parts[1] in self.ids:
            headers[ANSWER_OF] = parts[1]

        async def with_headers(message: Message) -> None:
            if message["type"].endswith("http.response.start"):
                added = [(name.lower().encode(), value.encode()) for name, value in headers.items()]
                message["headers"] = [*message.get("headers", []), *added]
            await send(message)

        await self.app(scope, receive, with_headers)
