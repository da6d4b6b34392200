"""``penstock slurm``: sweeps over deployments on a Slurm cluster, each point a job."""
