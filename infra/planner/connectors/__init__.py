"""What starts and ends the workers that a planner asks for: nothing, `penstock up`, or Kubernetes."""
