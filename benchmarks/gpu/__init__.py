"""The suite for machines with a GPU."""
