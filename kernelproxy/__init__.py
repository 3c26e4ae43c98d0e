"""The device proxy under which a kernel runs: activation, agent, worker, devices."""
