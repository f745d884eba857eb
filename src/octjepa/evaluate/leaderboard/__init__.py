"""Encoders side by side under one protocol: validation selects, the test set is used once and the use is counted.

Input: runs, checkpoints, weights or external encoders, a store, a table of labels. Output: metrics with intervals and
paired differences against a named reference, corrected, and against the strongest baseline, as plain data. Raises
UsageError on entries that cannot be read or compared, and on labels and splits as the probes do; an encoder that was
pretrained on test people is named and left out.
"""
