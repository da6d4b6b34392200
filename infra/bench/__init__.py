"""Benchmarks, each a module: ``python -m infra.bench.<name>``."""
