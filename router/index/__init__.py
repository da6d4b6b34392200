"""Which target caches which prefix."""
