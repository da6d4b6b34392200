"""Decisions by array operations instead of loops over the targets, which is faster for many of them. Needs numpy."""
