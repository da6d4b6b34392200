"""``penstock bench``: load on a deployment, routing policies in simulated time, KV handoff."""
