"""Loaders of tokenised data: ours and others', on the same corpus."""
