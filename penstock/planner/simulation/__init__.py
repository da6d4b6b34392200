"""The planner on traces in simulated time, against fleets of a fixed size."""
