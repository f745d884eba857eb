"""How octjepa compares with a named other way of doing the same work: ratios, measured in turn in one run.

Enter: a subject and the name of its peer (`run.run_bench`). Leaves: both figures, their ratio and its spread, of work
on phantoms that lie in a temporary folder. Fails with UsageError: an unknown subject or peer, a library that is absent.
"""
