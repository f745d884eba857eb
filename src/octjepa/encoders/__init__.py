"""Encoders: our own and those of other projects, behind one protocol.

An encoder maps volumes to tokens and to vectors, and says what it was trained on and by which preprocessing its volumes
are prepared. `load_encoder` gives one of ours, `external.load_external` one of another project. Raises CheckpointError
for weights that are damaged, UsageError for what describes no encoder.
"""

from octjepa.encoders.pretrained import PretrainedEncoder, load_encoder

__all__ = ["PretrainedEncoder", "load_encoder"]
