"""Compression of what is sent: codecs, error feedback, and the exchanges made of them."""
