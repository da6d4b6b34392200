"""One request as the log tells it: explanations, open leases, traces."""
