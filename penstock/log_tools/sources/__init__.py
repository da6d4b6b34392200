"""Where a command reads the log: a running broker, the data folder of a stopped one, or an export."""
