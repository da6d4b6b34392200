"""Tools that measure or draw, run by hand."""
