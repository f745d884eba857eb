"""The training loops. Both take the parts of an update from `engine`, so an update is the same in all trainings.

`loop` pretrains an encoder. Input: a recipe, a store and a run folder. Output: checkpoints, metrics and a summary in
the run folder. `supervised` trains fine-tunings, segmentation decoders, adapted segmenters, probes and the networks of
`tasks.truth` and `tasks.distil`. Input: a task, which computes batches and losses, and the networks. Output: the
weights with the least validation loss and, if a folder is given, metrics and the state that a resumed run reads.
RecipeError, ContractError, CheckpointError and UsageError are raised before the first update or between two updates.
"""
