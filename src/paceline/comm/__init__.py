"""Ranks, meshes and the machine they live on."""
