"""Which targets a request goes to, and what it costs there."""
