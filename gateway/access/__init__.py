"""Who may use the HTTP API, and how much of it."""
