"""What other versions, other programs and files on disk rely on, and the record of it."""
