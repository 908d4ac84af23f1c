"""Decisions as pure functions of Job and Cluster. Imports no torch."""
