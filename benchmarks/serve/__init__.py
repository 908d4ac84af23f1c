"""Texts per second, ours beside what others use on a CPU."""
