"""The eyes of a store, one by one, in a browser on this machine; of a run also what its encoder sees.

Enter: a store, or a run that names one. Leaves: nothing; the server answers on the loopback address alone, until it is
stopped. `scans` makes the answers, `server` gives them out, `static` holds the page.
"""

from octjepa.report.viewer.server import serve

__all__ = ["serve"]
