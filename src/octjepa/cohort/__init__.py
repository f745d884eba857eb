"""Who trains and who tests: selection of volumes, splits by person, leak checks, and the flow table."""
