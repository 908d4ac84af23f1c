"""Networks: single-device code that knows nothing of ranks, and their weights on disk."""
