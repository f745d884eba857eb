"""A page in headless chromium, driven over its remote debugging pipe: clicks, keys, pictures, requests, console.

The Chrome DevTools Protocol over file descriptors 3 and 4, a JSON message and a zero byte each way; needs no library.
"""

from __future__ import annotations

import base64
import json
import os
import select
import shutil
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
_OPTIONS = (
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--disable-quic",
    "--no-first-run",
    "--hide-scrollbars",
    "--remote-debugging-pipe",
)


class Page:
    """One tab. `console` holds errors and warnings of its console, `fetched` the urls that it requested."""

    def __init__(self, to_browser: int, from_browser: int) -> None:
        self._write, self._read, self._rest, self._number = to_browser, from_browser, b"", 0
        self.console: list[str] = []
        self.fetched: list[str] = []
        self._session = ""
        target = self.send("Target.createTarget", url="about:blank")["targetId"]
        self._session = self.send("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.send(f"{domain}.enable")

    def send(self, method: str, timeout: float = 90, **parameters: Any) -> dict[str, Any]:
        """The result of a command. Raises RuntimeError: it failed; TimeoutError."""
        self._number += 1
        message: dict[str, Any] = {"id": self._number, "method": method, "params": parameters}
        if self._session:
            message["sessionId"] = self._session
        os.write(self._write, json.dumps(message).encode() + b"\0")
        end = time.monotonic() + timeout
        while True:
            answer = self._next(end - time.monotonic())
            if answer.get("id") == message["id"]:
                if "error" in answer:
                    raise RuntimeError(f"{method}: {answer['error']['message']}")
                found: dict[str, Any] = answer["result"]
                return found

    def _next(self, timeout: float) -> dict[str, Any]:
        while b"\0" not in self._rest:
            if timeout <= 0 or not select.select([self._read], [], [], timeout)[0]:
                raise TimeoutError("the browser does not answer")
            if not (part := os.read(self._read, 1 << 20)):
                raise RuntimeError("the browser has ended")
            self._rest += part
        text, _, self._rest = self._rest.partition(b"\0")
        event: dict[str, Any] = json.loads(text)
        parameters = event.get("params", {})
        if event.get("method") == "Network.requestWillBeSent":
            self.fetched.append(parameters["request"]["url"])
        elif event.get("method") == "Runtime.exceptionThrown":
            details = parameters["exceptionDetails"]
            self.console.append(str(details.get("exception", {}).get("description") or details["text"]))
        elif event.get("method") == "Log.entryAdded" and parameters["entry"]["level"] in ("error", "warning"):
            self.console.append(f"{parameters['entry']['text']} {parameters['entry'].get('url', '')}")
        elif event.get("method") == "Runtime.consoleAPICalled" and parameters["type"] in ("error", "warning"):
            self.console.append(str([one.get("value") for one in parameters["args"]]))
        return event

    def look(self, width: int, height: int, dark: bool = False, phone: bool = False) -> None:
        """The size of the window in CSS pixels, and the colour scheme that the user prefers."""
        self.send("Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=phone)
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self.send("Emulation.setEmulatedMedia", features=[scheme])

    def open(self, url: str) -> None:
        """Goes to `url`, also where the page is there except for what follows the #."""
        self.send("Page.navigate", url="about:blank")
        self.send("Page.navigate", url=url)

    def value(self, script: str) -> Any:
        """The value of a JavaScript expression. Raises RuntimeError: it threw."""
        result = self.send("Runtime.evaluate", expression=script, returnByValue=True, awaitPromise=True)
        if "exceptionDetails" in result:
            raise RuntimeError(f"{script}: {result['exceptionDetails']}")
        return result["result"].get("value")

    def wait(self, script: str, timeout: float = 60) -> None:
        """Until a JavaScript expression is true. Raises TimeoutError with the page's text."""
        end = time.monotonic() + timeout
        while not self._holds(script):
            if time.monotonic() > end:
                raise TimeoutError(f"{script}: {self.console} {self.value('document.body.innerText')[-600:]}")
            time.sleep(0.05)

    def _holds(self, script: str) -> bool:
        try:
            return bool(self.value(f"Boolean({script})"))
        except RuntimeError:  # the page is not there yet
            return False

    def choose(self, selector: str, value: object) -> None:
        """Sets a field and tells the page, as a user's input does."""
        at = f"document.querySelector({json.dumps(selector)})"
        field = "checked" if isinstance(value, bool) else "value"
        notify = "for (const kind of ['input', 'change']) field.dispatchEvent(new Event(kind, {bubbles: true}))"
        self.value(f"(() => {{const field = {at}; field.{field} = {json.dumps(value)}; {notify}}})()")

    def press(self, key: str) -> None:
        """One key, down and up."""
        for kind in ("keyDown", "keyUp"):
            self.send("Input.dispatchKeyEvent", type=kind, key=key, **({"text": key} if len(key) == 1 else {}))

    def click(self, selector: str, u: float = 0.5, v: float = 0.5) -> None:
        """A click at a share of the element's width and height."""
        self.drag(selector, (u, v), (u, v))

    def drag(self, selector: str, start: tuple[float, float], end: tuple[float, float]) -> None:
        """The mouse pressed at one place of an element and let go at another."""
        box = self.value(
            f"(() => {{const node = document.querySelector({json.dumps(selector)});"
            " node.scrollIntoView({block: 'center'});"
            " const box = node.getBoundingClientRect(); return [box.left, box.top, box.width, box.height]})()"
        )
        for kind, (u, v) in (
            ("mouseMoved", start),
            ("mousePressed", start),
            ("mouseMoved", end),
            ("mouseReleased", end),
        ):
            buttons = {"button": "left", "clickCount": 1, "buttons": 0 if kind == "mouseReleased" else 1}
            if kind == "mouseMoved" and (u, v) == start and start != end:
                buttons = {}
            self.send("Input.dispatchMouseEvent", type=kind, x=box[0] + u * box[2], y=box[1] + v * box[3], **buttons)

    def picture(self, path: Path, whole: bool = True) -> Path:
        """A PNG of the page, as long as it is."""
        taken = self.send("Page.captureScreenshot", format="png", captureBeyondViewport=whole)
        path.write_bytes(base64.b64decode(taken["data"]))
        return path


@contextmanager
def browser_page(profile: Path) -> Iterator[Page]:
    """A new tab of a new browser, whose files are in `profile`."""
    assert CHROMIUM is not None
    (inner_read, outer_write), (outer_read, inner_write) = os.pipe(), os.pipe()

    def at_three_and_four() -> None:
        first, second = os.dup(inner_read), os.dup(inner_write)  # neither of them 3 or 4 by chance
        os.dup2(first, 3)
        os.dup2(second, 4)

    process = subprocess.Popen(
        [CHROMIUM, *_OPTIONS, f"--user-data-dir={profile}"],
        close_fds=False,
        preexec_fn=at_three_and_four,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    os.close(inner_read)
    os.close(inner_write)
    try:
        yield Page(outer_write, outer_read)
    finally:
        os.close(outer_write)
        os.close(outer_read)
        process.terminate()
        process.wait(20)
