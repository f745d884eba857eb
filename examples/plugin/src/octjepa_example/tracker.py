"""A tracker: every metric of a run as a line of `tracking/metrics.csv` in the run folder."""

import csv


class CSVTracker:
    """`run` is a `TrackedRun`: its folder, name, configuration, and the updates done before a resume."""

    def __init__(self, run):
        self.file = (run.folder / "metrics.csv").open("a" if run.first else "w", newline="")
        self.writer = csv.writer(self.file)

    def metrics(self, update, values):
        """Called in a separate thread after every update and validation. Training never waits for it."""
        self.writer.writerows((update, name, value) for name, value in values.items())

    def picture(self, update, image):
        """`[H, W, 3]`, uint8: views and masks."""

    def checkpoint(self, update, address):
        """Called where a checkpoint in a bucket may be named."""

    def close(self, finished):
        """Called at the end, also of a run that failed."""
        self.file.close()
