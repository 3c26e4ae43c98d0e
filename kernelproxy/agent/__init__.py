"""The agent: the daemon that owns this host's devices and its sessions' state."""
