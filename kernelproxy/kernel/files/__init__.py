"""Files of a notebook: tracked, bundled and restored."""
