"""Commands for operators: drain and restart processes, watch the fleet, and act on what the log holds."""
