"""Prometheus metrics with automatic labels, shared by all roles."""
