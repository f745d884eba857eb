"""What has to be shown on a machine with one NVIDIA GPU: `scripts/gpu/campaign`, and its rehearsal on a CPU."""
