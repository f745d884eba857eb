"""Pretraining: one visible loop (`octjepa.train.loop.pretrain`), its schedule, runtime, validation and journal.

Enter: a recipe, a store, a run folder. Leave: checkpoints, metrics and a summary in the run folder.
Fails with RecipeError, ContractError, CheckpointError or UsageError before or between updates, never half-written.
"""
