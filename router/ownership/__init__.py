"""Which router places the requests of which model."""
