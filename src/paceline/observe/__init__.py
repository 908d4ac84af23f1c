"""What is seen of a run: metrics, timelines, their accounting, and the pages that show them."""
