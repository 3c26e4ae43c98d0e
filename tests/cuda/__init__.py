"""Sessions with a CUDA build of torch, on a double of NVIDIA's driver and runtime."""
