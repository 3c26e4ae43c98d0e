"""Doubles for the engine, in virtual time."""
