"""Frozen probes: what a small model can read from an encoder's features, always beside baselines.

Enter: an embedding table and a label table. Leave: results {name, metric, value, low, high, n} with intervals
over people. Fails with UsageError on labels that do not fit the embeddings.
"""
