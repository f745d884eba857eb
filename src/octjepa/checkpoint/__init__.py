"""Weights on disk: written atomically, verified on reading, carrying the contract of their preprocessing.

Enter: a model, its optimizer and recipe. Leave: `step-*/` folders of safetensors and a manifest; or an `Encoder` back.
Fails with CheckpointError (missing, damaged, disk full) or ContractError (made otherwise); never loads a pickle.
"""

from octjepa.checkpoint.encoder import PretrainedEncoder, load_encoder

__all__ = ["PretrainedEncoder", "load_encoder"]
