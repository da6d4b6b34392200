"""One registration of a worker: its lease, jobs, output and terminal events."""
