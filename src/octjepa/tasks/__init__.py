"""Supervised tasks on a pretrained encoder: fine-tuning to labels, and segmentation of layers and lesions.

Enter: a task recipe, a checkpoint, a store and labels. Leave: a folder with the tuned network or head and its test
figures beside baselines. Fails with RecipeError on settings, UsageError on labels, ContractError on other weights.
"""
