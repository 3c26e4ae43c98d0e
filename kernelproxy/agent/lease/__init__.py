"""Leases: when a session may use its device."""
