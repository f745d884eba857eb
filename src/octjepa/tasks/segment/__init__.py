"""Layers and lesions of whole volumes from an encoder's tokens, measured by person, in the geometry of the scan.

Labels come in the scan's own voxels (`label_files`, `dicom_seg`), are resampled to the stored volume
(`labelled_volumes`) and learned by a linear head (`linear`) or a decoder (`decoder`, `network`), window by window
(`windows`). Predictions are measured in the scan's voxels again (`evaluation`, `thickness`), next to references that
know less (`fit`); `predict` applies a head to new scans.
"""
