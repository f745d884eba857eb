"""Processes and devices: ranks, collectives, flags, signals and torch_xla.

Enter: the launcher's environment. Leaves: a `Runtime` that knows the device and the rank. Fails with UsageError on an
incomplete launch, and with OctjepaError when another rank is gone.
"""
