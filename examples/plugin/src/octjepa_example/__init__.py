"""Parts of octjepa from a package of its own; pyproject.toml declares them as entry points."""
