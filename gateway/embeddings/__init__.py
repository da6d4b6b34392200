"""Embeddings: from a body to a request for embed workers, and from their vectors to an answer."""
