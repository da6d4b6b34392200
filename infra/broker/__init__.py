"""The embedded nats-server: its binary, its configuration, starting and stopping it, and the streams on it."""
