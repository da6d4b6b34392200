"""Erases the content of requests with ``no_store``, after their end and a grace period for their readers."""
