"""Files that clients upload, and batches of requests made of them."""
