"""Weights on disk: written atomically, verified on reading, carrying the contract of their preprocessing.

A model, its optimizer and recipe are saved as `step-*/` folders of safetensors with a manifest, and loaded again as a
`PretrainedEncoder`. Raises CheckpointError (missing, damaged, disk full); never loads a pickle.
"""

from octjepa.checkpoint.encoder import PretrainedEncoder, load_encoder

__all__ = ["PretrainedEncoder", "load_encoder"]
