"""Messages between processes: framing, channels, peer credentials (standard library only)."""
