"""The NATS door: submissions, services and numbered answers."""
