"""Requests in the log: listed, searched, inspected, followed."""
