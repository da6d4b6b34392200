"""The embedded nats-server: where its binary is, its configuration, its life, and the streams on it."""
