"""What `paceline validate` works out and shows."""
