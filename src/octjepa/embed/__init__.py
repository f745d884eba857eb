"""A frozen encoder's features of every volume of a store, keyed to person, eye and file.

Enter: a checkpoint and a store. Leave: a parquet table of pooled vectors next to those of the randomly initialised
encoder and of the intensity baselines, and on request tokens and B-scan features. Fails with ContractError on weights
of another preprocessing and with UsageError on a table that does not fit the store.
"""
