"""Assigns models to the routers that place their requests."""
