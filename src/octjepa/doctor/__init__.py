"""Is this machine, and this installation, fit for a run? Checks that each take moments and need no network.

Enter: a store, an output folder and a recipe, all optional. Leaves: a list of checks, each ok, warning or failed, with
what was found, what was expected and what to do.
"""

from octjepa.doctor.examine import examine

__all__ = ["examine"]
