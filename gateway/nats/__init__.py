"""The NATS API: submissions, services and numbered answers."""
