"""What stood behind the terms of a rank's steps: kernels, collectives, gaps, synchronisation.

One table each, of one recording; `observe.account` says what the columns mean.
"""
