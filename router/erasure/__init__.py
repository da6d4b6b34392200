"""Requests with ``no_store``: after their end, and a grace for their readers, everything they said is erased."""
