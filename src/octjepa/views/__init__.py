"""Everything random, as pure functions of (seed, epoch, volume id): geometry, light, tokens, masks, batches.

Enter: a store and a recipe. Leave: fixed-shape batches of patches, positions and mask indices.
Fails with UsageError when the store has no volume that the recipe asks for, ContractError when it was made otherwise.
"""
