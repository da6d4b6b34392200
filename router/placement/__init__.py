"""Chooses the targets of a request by its cost there."""
