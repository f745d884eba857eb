"""`OCTVolume` to `CanonicalVolume`: resampling, retinal surfaces, flattening, quality, and the way back.

`pipeline.canonicalise` runs all steps. The other modules hold one step each. `native_mapping` maps positions of a
canonical volume to the native scan and back.
"""
