"""The C++ libraries: they are found, or built once."""
