"""The parts of an eye that an encoder or a tuned network uses, as maps in the geometry of the scan as it came.

`occlusion` leaves tokens out, `similarity` compares tokens, `components` gives tokens of like features like colours,
and `attention` shows what a probe or a tuned head weighs. `native` lays the values of tokens on the scan, `files`
writes them. The report and the viewer only draw these values.
"""
