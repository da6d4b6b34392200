"""What runs a request: tokens, images and videos, or embeddings."""
