"""Constraints on the output as grammars of llguidance, from JSON schemas and patterns, and whether they compile."""
