"""Runners of requests: for tokens, images and videos, or embeddings."""
