"""Measuring: the machine that this runs on becomes a Cluster that the planner can price."""
