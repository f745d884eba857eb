"""Distils a frozen teacher, such as a 2D foundation model that reads B-scans, into a 3D encoder.

In: an encoder (or its random initialisation), a store, and any encoder of `octjepa.encoders` as the teacher. Out: an
encoder with the same architecture and contract. A linear head predicts the teacher's tokens and is dropped at export.
"""
