"""The report: one self-contained HTML page about a run, a fine-tuning, a segmentation, a store or a demo folder.

Input is a folder with the files that the other commands wrote; output is one HTML file without scripts or network
references, that a clinician-researcher can read and check. What the folder lacks is named on the page as missing; any
other folder is a UsageError. `leaderboard` writes the files of a leaderboard with the same templates.
"""

from octjepa.report.page import write_report

__all__ = ["write_report"]
