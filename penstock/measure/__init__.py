"""Benchmarks, profiles and simulations: what a deployment does under a load, measured or computed."""
