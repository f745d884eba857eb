"""The viewer: the eyes of a store in a browser on this machine, and of a run also its encoder's tokens and masks.

The server answers on the loopback address alone until it is stopped. `scans` computes the answers, `server` serves
them, `static` holds the page.
"""

from octjepa.viewer.server import serve

__all__ = ["serve"]
