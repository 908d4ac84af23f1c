"""Steps of small decoders with adapters and without, in turns, and what the planner says of both.

One thread of a CPU does both, and only the seconds count in which it had a core. The planner knows
what `paceline train` measures of a machine that it has not seen, and nothing of these steps.

    python -m benchmarks.adapter_steps [--steps 20]
"""

import os
import sys
import time
from typing import Any

import torch
from torch.nn.functional import cross_entropy

from benchmarks.provenance import folder_of, keep, parser_of, signature, taken_with
from benchmarks.tables import Spread, markdown
from paceline.config.finetune import Finetune
from paceline.config.hardware import Cluster
from paceline.config.layout import Layout
from paceline.config.model import Model
from paceline.config.stack import Stack
from paceline.machine.cpu_speed import CpuWorkers, measure
from paceline.machine.discovery import this_machine
from paceline.models.adapters import adapt
from paceline.models.decoder import Decoder
from paceline.plan.points import Setting
from paceline.plan.price.step import predict

_SEQ_LEN, _WARM_UP = 256, 3
# Width, inner width, heads, samples of a step, rank.
_TASKS = ((256, 704, 4, 4, 8), (256, 704, 4, 4, 64), (512, 1408, 8, 2, 8))


class _Training:
    """A decoder that is trained as far as `finetune` says."""

    def __init__(self, model: Model, finetune: Finetune) -> None:
        torch.manual_seed(0)
        self.network = Decoder(model)
        if finetune.is_adapted:
            adapt(self.network, finetune)
        for parameter in self.network.parameters():
            torch.nn.init.normal_(parameter, std=0.02)
        self._trained = [each for each in self.network.parameters() if each.requires_grad]
        self._optimizer = torch.optim.AdamW(self._trained, fused=True)

    def step_s(self, tokens: torch.Tensor, targets: torch.Tensor) -> float:
        """Seconds of a step in which this thread had a core."""
        began_s = time.thread_time()
        cross_entropy(self.network(tokens).flatten(0, 1), targets.flatten()).backward()
        torch.nn.utils.clip_grad_norm_(self._trained, 1.0)
        self._optimizer.step()
        self._optimizer.zero_grad()
        return time.thread_time() - began_s


def compare(task: tuple[int, ...], cluster: Cluster, steps: int) -> dict[str, Any]:
    """Steps of both kinds, measured and predicted, in seconds; everything first."""
    hidden, ffn, heads, batch, rank = task
    model = Model(
        vocab_size=258,
        hidden_size=hidden,
        ffn_size=ffn,
        num_layers=4,
        num_heads=heads,
        max_seq_len=_SEQ_LEN,
    )
    kinds = (Finetune(), Finetune(method="lora", rank=rank))
    both = [_Training(model, kind) for kind in kinds]
    tokens, targets = (torch.randint(258, (batch, _SEQ_LEN)) for _ in range(2))
    measured = []
    for number in range(_WARM_UP + steps):
        order = (0, 1) if number % 2 else (1, 0)
        taken = {at: both[at].step_s(tokens, targets) for at in order}
        measured.append([taken[0], taken[1]])
    layout = Layout(micro_batch=batch, precision="fp32")
    predicted = [
        predict(Setting(model, cluster, _SEQ_LEN, batch, Stack(), finetune=kind), layout).step_s
        for kind in kinds
    ]
    return {
        "params": model.num_params,
        "tokens": batch * _SEQ_LEN,
        "rank": rank,
        "measured_s": measured[_WARM_UP:],
        "predicted_s": predicted,
    }


def _line(found: dict[str, Any]) -> list[str]:
    everything, adapters = found["predicted_s"]
    ratios = [tuned / full for full, tuned in found["measured_s"]]
    return [
        f"{found['params'] / 1e6:.1f} M",
        f"{found['tokens']:,}",
        f"{found['rank']}",
        *(Spread.of(each).text(".2f") for each in zip(*found["measured_s"], strict=True)),
        f"{everything:.2f}, {adapters:.2f}",
        Spread.of(ratios).text(".2f"),
        f"{adapters / everything:.2f}",
    ]


def main() -> None:
    """Compare all tasks, and keep what was found."""
    parser = parser_of(__doc__)
    parser.add_argument("--steps", type=int, default=20, help="pairs of steps of each task")
    asked = parser.parse_args()
    about = taken_with("benchmarks.adapter_steps")
    torch.set_num_threads(1)
    device = measure(this_machine().device, CpuWorkers(1, 1, 1))
    cluster = Cluster(device=device, devices_per_node=1, num_nodes=1)
    found = []
    for task in _TASKS:
        print(f"{task[0]} wide, rank {task[-1]}, load {os.getloadavg()[0]:.1f}", file=sys.stderr)
        found.append(compare(task, cluster, asked.steps))
    titles = ("parameters", "tokens", "rank", "everything, s", "adapters, s", "predicted, s")
    titles += ("measured ratio", "predicted ratio")
    page = "# Steps with adapters over steps without\n\n"
    page += markdown(titles, [_line(each) for each in found])
    page += f"\nMedian and range of {asked.steps} pairs, seconds of one thread that had a core.\n"
    page += f"\n{signature(about)}\n"
    print(page)
    keep(folder_of(asked.results, about), "adapter_steps", {"about": about, "tasks": found}, page)


if __name__ == "__main__":
    main()
