"""In-kernel part of the project (standard library and torch only)."""
