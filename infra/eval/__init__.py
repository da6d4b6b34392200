"""Is what comes out right? Evaluations through a running deployment."""
