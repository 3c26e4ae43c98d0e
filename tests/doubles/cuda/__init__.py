"""Double of NVIDIA's driver and runtime, and its build."""
