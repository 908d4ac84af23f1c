"""Quantize: values as small numbers times one scale per block."""
