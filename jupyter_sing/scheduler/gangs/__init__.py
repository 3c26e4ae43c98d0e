"""Gangs: how many devices suit the ranks of a job, when it grows, and how that is explained."""
