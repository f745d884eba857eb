"""A run, a store or a demo folder as one self-contained HTML page that a clinician-researcher can read and check.

Enter: a folder with what the other stages left in it. Leaves: one HTML file without scripts or network references.
What the folder lacks is named on the page as missing; a folder that is none of the three is a UsageError.
"""

from octjepa.report.page import write_report

__all__ = ["write_report"]
