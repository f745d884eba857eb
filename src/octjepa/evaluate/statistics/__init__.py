"""Figures about figures: calibration, decisions, subgroups, sites, seeds, many comparisons, and uses of the test set.

Enter: predictions of test volumes, their people, and the draws of `octjepa.evaluate.intervals`. Leave: plain rows with
intervals. Fails with UsageError on a threshold, a family or a ledger that makes no sense.
"""
