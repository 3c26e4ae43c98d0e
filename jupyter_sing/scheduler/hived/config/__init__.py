"""Configuration of HiveD's cells."""
