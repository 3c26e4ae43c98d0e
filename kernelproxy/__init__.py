"""How a kernel runs under a device proxy: activation, agent, worker, devices."""
