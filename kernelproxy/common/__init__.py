"""Modules that any process may import (standard library only)."""
