"""Images and embeddings that a request names: where they are, whether they may be asked for, what they hold."""
