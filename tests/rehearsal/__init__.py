"""A rehearsal of the first contact with a GPU, on a machine without one.

`device` stands in for a CUDA device: torch's own dispatch, autograd engine and streams believe that
there is one, and tensors on it are fake (shapes, dtypes and devices, no values). `streams` checks
that what one stream does with a tensor is ordered after what another one did. `cases` are whole
training steps; `python -m tests.rehearsal` runs them and prints one JSON object for each.

Not here: values. What kernels compute is proved in the interpreter and, on a GPU, by the tests that
carry the mark `gpu`.
"""
