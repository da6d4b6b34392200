"""``penstock bench sweep``, ``plot`` and ``compare``: measure servers at several levels of load, and compare them."""
