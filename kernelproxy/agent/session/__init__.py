"""Sessions and the commands that users give them."""
