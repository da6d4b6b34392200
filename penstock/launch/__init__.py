"""``penstock up``: a deployment on this machine, each role in processes of its own, under one supervisor."""
