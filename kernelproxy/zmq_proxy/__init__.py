"""ZMQ proxy between a kernel's clients and its process."""
