"""Which deployment serves most per GPU within given latencies: mappings, aggregated or split, and sizes of pools."""
