"""The price of a layout in seconds: operators, kernels, parts, pipeline, step, timeline."""
