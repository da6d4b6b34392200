"""Images and embeddings that a request names: where they are, whether they may be fetched, what they contain."""
