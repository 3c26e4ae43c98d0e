"""The scheduler on notebooks that do not exist: workloads, virtual time, baselines, figures."""
