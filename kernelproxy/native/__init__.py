"""The C++ libraries: found, or built once."""
