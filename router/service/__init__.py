"""The way of a request through a router, and what a router does at intervals."""
