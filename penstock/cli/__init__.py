"""The ``penstock`` command: its sub-commands, completion, and how commands print."""
