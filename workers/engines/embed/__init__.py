"""Engines of embed workers: texts become vectors."""
