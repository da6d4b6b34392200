"""Measures embeddings against the same computed with plain transformers."""
