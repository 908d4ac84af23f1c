"""What `paceline ladder` does: small runs, laws fitted to them, and the run that a budget buys."""
