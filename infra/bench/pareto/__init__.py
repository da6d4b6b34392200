"""Which deployments are worth their GPUs: Pareto fronts and cost curves from the results of sweeps."""
