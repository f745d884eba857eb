"""The equations of pretraining: objectives, regularisers, baselines and rank metrics.

`jepa`, `levjepa` and `mae` hold the objectives. `octjepa.objectives.base` says what an objective is and how
another package adds one. Two encoders that do not match raise ValueError.
"""
