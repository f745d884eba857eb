"""Fine-tuning of an encoder to labels in stages, chosen on validation people, measured once on test people.

In: a checkpoint, a store and a label table (`tuning_data`); `training` tunes the network (`network`), `evaluation`
measures it next to the same encoder frozen, `fit` is the whole verb. Out: a tuned encoder with its heads (`folder`),
which `predict` applies to new scans. Fails with UsageError on labels that do not fit, ContractError on a store prepared
otherwise, Interrupted after a signal.
"""
