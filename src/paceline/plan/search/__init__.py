"""Every layout of a cluster: the space, its bounds, the best of it, and why."""
