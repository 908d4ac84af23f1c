"""Settings for every test."""

import torch

# Tests are many small tensors on few cores: threads would wait for each other.
torch.set_num_threads(1)
