"""The viewer: the eyes of a store in a browser on this machine, and of a run also its encoder's tokens and masks.

The server answers only on the loopback address until it is stopped. `scans` computes the answers, `server` serves
them, `static` holds the page.
"""

from octjepa.viewer.server import ShownWith, serve

__all__ = ["ShownWith", "serve"]
