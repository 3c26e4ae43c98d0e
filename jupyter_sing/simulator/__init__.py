"""Simulator: the scheduler on synthetic notebooks: workloads, virtual time, baselines, figures."""
