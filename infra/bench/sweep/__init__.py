"""``penstock bench sweep``, ``plot`` and ``compare``: load at several levels, and what its figures show."""
