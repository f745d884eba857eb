"""People who train and people who test: selection of volumes, splits by person, leak checks, and the flow table."""
