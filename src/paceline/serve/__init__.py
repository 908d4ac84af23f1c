"""Answers from what was trained, to people and programs."""
