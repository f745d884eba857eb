"""Heads: layers and lesions of whole volumes from an encoder's tokens, measured by person, in the scan's geometry.

Labels come in the scan's own voxels (`octjepa.tasks.labels`), are resampled to the stored volume (`labelled_volumes`)
and learned by a linear head (`linear`) or a decoder (`decoder`, `network`), window by window (`windows`). Predictions
are measured in the scan's voxels again (`evaluation`, `octjepa.tasks.thickness`), next to references that know less
(`fit`); `predict` applies a head to new scans. The packaged network for scans is `octjepa.tasks.segmenter`.
"""
