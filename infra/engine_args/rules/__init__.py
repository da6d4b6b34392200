"""Rules for combinations of engine arguments: which fail, and which are only slow. Pure."""
