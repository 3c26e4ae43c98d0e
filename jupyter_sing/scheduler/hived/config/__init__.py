"""HiveD's cells as a configuration describes them."""
