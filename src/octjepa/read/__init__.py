"""Any file to an `OCTVolume` in native geometry, or a `VolumeRejected` that says why.

`reader.read_volume` recognises the format, reads it and assembles the volume: pixels, spacing with provenance,
laterality, device, scan pattern, ids and hash. The codes of rejections are listed in `octjepa.reasons`.
"""
