"""Steps of the GPU suite."""
