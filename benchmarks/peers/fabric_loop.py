"""Lightning Fabric, after "Convert PyTorch code to Fabric" of its documentation, by `fabric run`.

The launcher says which accelerator, strategy and number of devices; loaders are sharded by
`setup_dataloaders`. No logger and no checkpoint: they would only add to it.
"""

from lightning_fabric import Fabric
from torch.optim.lr_scheduler import LambdaLR
from torch.utils.data import DataLoader
from workload import Clock, Samples, Workload

from paceline.kernels.loss import cross_entropy


def main() -> None:
    work, clock = Workload.read(), Clock()
    fabric = Fabric()  # already launched
    network = work.network()
    model, optimizer = fabric.setup(network, work.adamw(network))
    scheduler = LambdaLR(optimizer, work.lr_factor)
    share = work.job.train.global_batch // fabric.world_size
    loader = fabric.setup_dataloaders(DataLoader(Samples(work), batch_size=share))
    for tokens, targets in loader:
        loss = cross_entropy(model(tokens), targets)
        fabric.backward(loss)
        fabric.clip_gradients(model, optimizer, max_norm=work.job.optim.clip_norm)
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
        clock.step_done(loss)
    clock.finish(work.result)


if __name__ == "__main__":
    main()
