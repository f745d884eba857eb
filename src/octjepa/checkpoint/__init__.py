"""Weights on disk: written atomically, verified when they are read, carrying the contract of their preprocessing.

A model, its optimizer and recipe are saved as `step-*/` folders of safetensors with a manifest; `weights` reads one
encoder of them, which `octjepa.encoders` makes usable. Raises CheckpointError (missing, damaged, disk full); never
loads a pickle.
"""
