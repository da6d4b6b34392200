"""Processes of one machine: children and their supervisor, signals, sockets, scheduling."""
