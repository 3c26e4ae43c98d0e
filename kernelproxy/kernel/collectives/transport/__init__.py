"""Bytes between the processes of ranks: sockets, and memory that ranks of a host share."""
