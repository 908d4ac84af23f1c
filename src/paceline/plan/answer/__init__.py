"""What `paceline plan` asks and shows."""
