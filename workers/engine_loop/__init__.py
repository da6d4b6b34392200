"""The engine's thread: commands, steps, and what the steps return."""
