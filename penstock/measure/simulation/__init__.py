"""A fleet of inference engines in simulated time, for comparing routing policies on the same engines."""
