"""Encoders side by side under one protocol: validation chooses, the test set is read once and the reading is counted.

Enter: runs, checkpoints, weights or encoders of others, a store, a label table. Leave: rows with intervals, paired
differences against a named reference with correction, as CSV, Markdown, HTML and plain data. Fails with UsageError on
entries that cannot be read or compared, and on labels and splits as the probes do; a leaking encoder is named and left
out.
"""
