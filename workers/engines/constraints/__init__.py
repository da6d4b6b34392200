"""Constraints on the output of sequences: grammars compiled once, and their state beside each sequence."""
