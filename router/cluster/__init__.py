"""The cluster as the logs and the workers bucket show it."""
