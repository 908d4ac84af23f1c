"""`paceline top`: runs, watched while they go on, from their directories alone; no torch."""
