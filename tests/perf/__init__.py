"""Measurements of single parts, run by hand."""
