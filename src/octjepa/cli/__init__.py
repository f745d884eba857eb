"""The command line: a verb per stage, paths and options only. Everything a verb does lives in its package.

A new verb is a function under `@app.command()` in the module of its stage. Help lists the verbs in the order in which
the modules are imported here.

Exit codes: 0 done, 1 failed, 2 bad usage, recipe or input, 3 finished but too much was lost, 130 and 143 after Ctrl-C
and SIGTERM. With --json the last line of stdout is one JSON object and stdout holds nothing else; logs go to stderr.
"""

from __future__ import annotations

# isort: off
from octjepa.cli.root import app, main
from octjepa.cli import data, datasets, recipes, training, results, tuning, segmentation, doctor

__all__ = ["app", "data", "datasets", "doctor", "main", "recipes", "results", "segmentation", "training", "tuning"]
