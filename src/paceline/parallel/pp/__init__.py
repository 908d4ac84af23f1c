"""Pipeline parallel: run a Schedule's list of actions on the ranks of a pipeline.

How it works: `program.lower` turns the Schedule into this rank's program: its own actions, with the
transfers between ranks and FSDP's gather and reduce in their places. torch's own runtime
(`torch.distributed.pipelining`) executes the program; a `stage.Stage` is what it calls for each
action. `Pipeline` puts them together.

It makes no schedules (`paceline.plan.schedules`), splits no model, and needs no change in the
stages: a part is any module that maps a tensor (and keyword arguments) to a tensor.

Papers: GPipe https://arxiv.org/abs/1811.06965, 1F1B https://arxiv.org/abs/2006.09503, split
backward https://arxiv.org/abs/2401.10241, DualPipe https://arxiv.org/abs/2412.19437
"""

from paceline.parallel.pp.pipeline import MicroBatch, Pipeline
from paceline.parallel.pp.stage import Criterion

__all__ = ["Criterion", "MicroBatch", "Pipeline"]
