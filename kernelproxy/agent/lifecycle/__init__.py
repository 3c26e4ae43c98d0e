"""One whole session: its parts, its reconcile loop, its beginning and end, its commands."""
