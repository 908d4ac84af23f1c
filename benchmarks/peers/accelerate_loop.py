"""Hugging Face Accelerate, after "Add Accelerate to your code" of its documentation, by torchrun.

`accelerate launch` starts several CPU processes through MPI alone; torchrun is what its
documentation names beside it. By default the prepared scheduler steps once per process, for
schedules that count single-process steps; this one counts optimizer steps, and says so.
"""

from accelerate import Accelerator
from torch.optim.lr_scheduler import LambdaLR
from torch.utils.data import DataLoader
from workload import Clock, Samples, Workload

from paceline.kernels.loss import cross_entropy


def main() -> None:
    work, clock = Workload.read(), Clock()
    accelerator = Accelerator(cpu=True, step_scheduler_with_optimizer=False)
    share = work.job.train.global_batch // accelerator.num_processes
    network = work.network()
    optimizer = work.adamw(network)
    model, optimizer, loader, scheduler = accelerator.prepare(
        network,
        optimizer,
        DataLoader(Samples(work), batch_size=share),
        LambdaLR(optimizer, work.lr_factor),
    )
    for tokens, targets in loader:
        loss = cross_entropy(model(tokens), targets)
        accelerator.backward(loss)
        accelerator.clip_grad_norm_(model.parameters(), work.job.optim.clip_norm)
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
        clock.step_done(loss)
    clock.finish(work.result)


if __name__ == "__main__":
    main()
