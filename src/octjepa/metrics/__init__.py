"""Metrics and their intervals: scores, bootstrap by person, calibration, thresholds, subgroups, sites, seeds.

Enter: predictions of held-out volumes and the people they belong to. Leave: values with intervals, paired differences
and corrected p-values. Fails with UsageError on a threshold, a family of comparisons or a ledger that makes no sense.
"""
