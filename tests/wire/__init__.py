"""Recorded interfaces on which other versions, other programs and files on disk rely."""
