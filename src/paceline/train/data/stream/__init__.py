"""Live sources: a log of segments that one process writes and ranks read (docs/streams.md)."""
