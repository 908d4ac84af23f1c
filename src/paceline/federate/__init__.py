"""Federated fine-tuning: many clients train adapters, and a server learns the sum alone."""
