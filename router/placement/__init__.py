"""What a request costs at each target in mode "kv", and which of them takes it."""
