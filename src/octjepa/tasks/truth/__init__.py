"""Trains an encoder on the ground truth of randomised phantoms: classes and boundaries of every voxel.

In: an encoder (or its random initialisation). Out: an encoder with the same architecture and contract. Light linear
heads learn the truth from the encoder's tokens and are dropped at export.
"""
