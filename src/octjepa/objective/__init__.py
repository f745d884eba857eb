"""The equations of pretraining: objectives, regularisers, baselines and rank metrics.

Each objective is one file of `octjepa.objective.methods`; `octjepa.objective.base` says what one is made of and how a
package adds another. Two encoders that do not match raise ValueError.
"""
