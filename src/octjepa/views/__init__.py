"""Everything random, as pure functions of (seed, epoch, volume id): geometry, intensity, tokens, masks, batches.

A store and a recipe become fixed-shape batches of patches, positions and mask indices. UsageError: the store has no
volume that the recipe selects; ContractError: it was made with another preprocessing.
"""
