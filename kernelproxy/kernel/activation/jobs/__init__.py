"""Jobs of several ranks: their start by `jupyter sing run`, and what a rank reports."""
