"""What every folder of the gateway stands on: errors, metrics, options of bodies, events, objects of answers."""
