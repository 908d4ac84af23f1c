"""The loop that closes by itself: measure, plan, try, explain, keep what helped."""
