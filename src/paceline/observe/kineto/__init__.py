"""Reading the traces of torch.profiler (Kineto)."""
