"""The packaged segmentation network: layers and fluid of any scan, trained on phantoms alone."""
