"""What is known of devices that one can buy or rent: their limits, and curves of their speed.

`devices` holds the vendors' figures. The JSON files beside it hold measured times of kernels, made
by `tools/derive_curves.py` from published tables; `curves` reads one when it is first asked for,
so that importing this package reads none.
"""
