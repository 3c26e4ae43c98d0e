"""Residency of a session: it gets a worker, and loses it, is suspended, spilled or migrated."""
