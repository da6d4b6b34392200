"""Metrics of a worker, of its engine's other processes, and of its GPUs."""
