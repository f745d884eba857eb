"""The objectives that come with the package: one file each, named like the objective it registers."""
