"""octjepa."""
