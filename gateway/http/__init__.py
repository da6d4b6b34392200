"""The HTTP door: connections and their limits, routes, answers over ASGI."""
