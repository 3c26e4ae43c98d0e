"""A directory for PYTHONPATH of child processes; nothing imports it as a package."""
