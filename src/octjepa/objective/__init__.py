"""The equations: losses, the EMA target, trivial predictors and the rank of features; nowhere else.

Enter: predictions and targets, or two encoders. Leave: scalars, or the target moved in place.
Fails with ValueError when two encoders do not match.
"""
