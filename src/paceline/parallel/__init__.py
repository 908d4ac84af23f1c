"""Puts a module on a mesh: replicas, shards, recompute, precision."""
