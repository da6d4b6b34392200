"""Messages that are still needed are published again before their stream discards them."""
