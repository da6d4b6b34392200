"""Figures about structured output, by hand: not part of ``make test``."""
