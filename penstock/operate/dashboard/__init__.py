"""``penstock dashboard``: one process that reads the log and the fleet, and shows them in a browser."""
