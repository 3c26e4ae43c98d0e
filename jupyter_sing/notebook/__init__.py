"""In-kernel user interface: magics, the widget and the texts of both."""
