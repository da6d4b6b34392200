"""Benchmarks, each a module: ``python -m penstock.infra.bench.<name>``."""
