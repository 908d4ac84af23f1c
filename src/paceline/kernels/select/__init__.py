"""Select: a few of many values, and the positions where they stood."""
