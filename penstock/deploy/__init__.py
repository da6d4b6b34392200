"""Files for other schedulers, made from one description of a deployment; see ``penstock/deploy`` for the chart."""
