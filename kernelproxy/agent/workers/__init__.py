"""Workers, zygotes and their watchdogs."""
