"""Edge: networks for small devices, each written in another party's format and run by its runtime.

`command` writes and judges, `runtime` runs a file in a process of its own.
"""
