"""Recipes: engine arguments for known models, checked and explained. ``penstock recipe list|show|check``."""
