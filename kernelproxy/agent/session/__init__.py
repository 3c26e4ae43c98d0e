"""Sessions and what users ask of them."""
