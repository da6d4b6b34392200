"""Benchmarks, profiles, simulations, and the planner that follows from them."""
