"""A router's state: the cached prefixes and the load of each target, and lost workers."""
