"""What runs inside the notebook: magics, widget and the texts of both."""
