"""What a worker counts, and the values of its engine's other processes."""
