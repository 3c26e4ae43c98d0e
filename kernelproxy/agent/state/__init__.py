"""Device state: snapshot plus op log."""
