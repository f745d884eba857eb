"""Frozen encoders to evidence: embeddings keyed to person and eye, probes with intervals, always beside baselines.

Enter: a checkpoint, a store, a label table. Leave: a parquet of vectors, rows of {name, metric, value, low, high, n}.
Fails with UsageError on labels that do not fit, ContractError on weights of another preprocessing.
"""
