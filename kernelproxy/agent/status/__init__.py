"""Descriptions of sessions, and the subscribers that receive them."""
