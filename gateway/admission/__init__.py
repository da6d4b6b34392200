"""Whether new work is taken: room in the queues and in the streams, repeats of a request."""
