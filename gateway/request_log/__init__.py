"""Requests and answers in the log: found, followed, caught up with, completed."""
