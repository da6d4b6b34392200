"""Compares measured deployments by GPU and by cost: Pareto fronts and cost curves from the results of sweeps."""
