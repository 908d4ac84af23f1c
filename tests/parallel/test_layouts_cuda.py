"""The layouts of test_combinations on CUDA devices over NCCL, against one CPU rank, in fp64.

One device trains alone; several devices take every technique that they are enough for.
"""

import pytest
import torch

from tests.parallel.test_combinations import ALONE
from tests.parallel.training import FP64, MODELS, assert_equal, run_cases, train

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
NUM_DEVICES = torch.cuda.device_count() if torch.cuda.is_available() else 0
# Other kernels add up in another order than the CPU's.
TOLERANCE = 1e-9


@pytest.mark.parametrize("kind", MODELS)
def test_one_device_equals_one_cpu_rank(kind):
    settings = (*FP64, *MODELS[kind], "layout.micro_batch=4")
    ran = train(0, 1, settings, "cuda")
    assert_equal([ran], train(0, 1, settings), TOLERANCE, kind)


@pytest.mark.parametrize("name", ALONE)
def test_devices_equal_one_cpu_rank(name):
    num_ranks, kind, settings = ALONE[name]
    if num_ranks > NUM_DEVICES:
        pytest.skip(f"needs {num_ranks} CUDA devices")
    layout = [f"layout.{each}" for each in settings.split()]
    layout += [] if "micro_batch" in settings else ["layout.micro_batch=4"]
    (ran,) = run_cases(num_ranks, [(*FP64, *MODELS[kind], *layout)], device_type="cuda")
    serial = train(0, 1, (*FP64, *MODELS[kind], "layout.micro_batch=4"))
    assert_equal(ran, serial, TOLERANCE, name)
