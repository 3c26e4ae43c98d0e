"""What runs inside a notebook's kernel (standard library and torch only)."""
