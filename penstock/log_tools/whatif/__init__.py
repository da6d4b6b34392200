"""``penstock whatif``: recorded routing decisions, decided again with other weights, modes or workers."""
