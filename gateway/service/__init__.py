"""The part that HTTP and NATS share: models, preparing bodies, accepting requests, following their answers."""
