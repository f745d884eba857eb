"""An encoder tuned to labels in stages, chosen on validation people, judged once on test people beside itself frozen.

Enter: a checkpoint, a store and a label table (`cohort`); `learn` tunes the network (`network`), `judge` measures it,
`fit` is the whole verb. Leave: a tuned encoder with its heads (`saved`), which `apply` uses on new scans. Fails with
UsageError on labels that do not fit, ContractError on a store prepared otherwise, Interrupted when told to stop.
"""
