"""Why a step takes as long as it does, and what to change: no torch."""
