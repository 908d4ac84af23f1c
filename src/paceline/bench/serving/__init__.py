"""Measuring how texts are made: passes of one network on this machine, and loads as they come."""
