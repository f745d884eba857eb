"""One evaluation protocol, and the results of everything that is measured on test people.

Input: predictors (frozen probes, tuned networks, segmentation heads), and the labels of the test people. Output:
metrics with intervals over people, paired differences and faults, as the classes of `evaluate.results`. The protocol
(labels, person and leak checks, cases, targets, selection on validation data, ledger, one access to the test set,
comparisons) is in `evaluate.protocol`; docs/decisions/0006-evaluation-protocol.md says what its callers share and how
they differ. Raises UsageError for labels, splits and encoders that cannot be evaluated.
"""
