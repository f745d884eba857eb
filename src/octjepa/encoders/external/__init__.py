"""Encoders of other projects behind one interface, so that they are compared under the same protocol as ours.

`load_external` takes a folder with safetensors weights (`folders`), or `NAME:PATH`, a published checkpoint by the name
of its encoder (`published`) or a module of another package (entry points of the group `octjepa.encoders`). Each gives
tokens of the centred view of a canonical volume, which are pooled exactly as ours are. Raises UsageError for what
describes no encoder, CheckpointError for weights that are damaged or would leave a part of the network random.
"""

from octjepa.encoders.external.base import ExternalEncoder, check_address, is_external, load_external, refuse_external

__all__ = ["ExternalEncoder", "check_address", "is_external", "load_external", "refuse_external"]
