"""The base of every folder of the gateway: errors, metrics, options of bodies, events, objects of answers."""
