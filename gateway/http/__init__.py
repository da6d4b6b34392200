"""The HTTP API: connections and their limits, routes, answers over ASGI."""
