"""Test doubles of our interfaces: a client, a zygote with workers."""
