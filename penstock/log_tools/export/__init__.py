"""Recorded requests as files, and back."""
