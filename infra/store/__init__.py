"""The streams of a broker that does not run, read from its files: no server is started, and nothing is copied."""
