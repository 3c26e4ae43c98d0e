"""The supervisor, which keeps descriptors beyond the daemon's life."""
