"""Which targets a request goes to."""
