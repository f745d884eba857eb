"""Layers and lesions of whole volumes from an encoder's tokens, judged by person and given back in the scan's geometry.

Labels come in the scan's own voxels (`label_files`), are laid on the stored volume (`places`) and learnt by a linear
head (`linear`) or a light decoder (`decoder`), window by window (`windows`). What they say is measured in the scan's
voxels again (`judge`, `thickness`), with the rows that know nothing beside it (`fit`); `apply` gives it for new scans.
"""
