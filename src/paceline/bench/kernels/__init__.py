"""How fast and how right the kernels are on this GPU: cases, timing, checks, tuning."""
