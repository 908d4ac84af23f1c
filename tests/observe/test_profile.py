"""Profiled windows: which steps they record and what they leave (one process), then the account of
real training steps under DDP, FSDP2, accumulation, recompute and bf16 (gloo ranks)."""

import contextlib
import gzip
import json

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.profiler import record_function
from torch.utils.checkpoint import checkpoint

from paceline.observe.accounting import accounting
from paceline.observe.kineto.read import read_kineto
from paceline.observe.profile import ProfiledWindows
from paceline.observe.recorded import read_account
from paceline.observe.terms import TERM_ID
from paceline.observe.timeline import Timeline
from tests.ranks import run_ranks


def train_a_little(windows, first, last):
    """Run steps of a small product; return what each call of `step` returned."""
    weight = torch.ones(64, 64)
    answers = {}
    with windows:
        for step in range(first, last):
            with record_function("paceline.step"):
                for _ in range(5):
                    weight @ weight
            answers[step] = windows.step()
    return answers


def test_windows_record_the_same_steps_in_every_process(tmp_path):
    answers = train_a_little(ProfiledWindows(tmp_path / "trace", 0, 10, 2), 0, 17)
    # Warm-up at 3 and 13; 4, 5 and 14, 15 are recorded.
    assert {step: sorted(a) for step, a in answers.items() if a} == {5: [4, 5], 15: [14, 15]}
    assert all(terms["matmul"] > 0 for a in answers.values() for terms in a.values())
    assert sorted(p.name for p in (tmp_path / "trace").iterdir()) == [
        "rank0-step14.json.gz",
        "rank0-step4.json.gz",
    ]


def test_a_resumed_run_keeps_the_numbers(tmp_path):
    answers = train_a_little(ProfiledWindows(tmp_path, 0, 10, 2, first_step=12), 12, 17)
    assert {step: sorted(a) for step, a in answers.items() if a} == {15: [14, 15]}
    # Started in the middle of a window: no half window.
    answers = train_a_little(ProfiledWindows(tmp_path, 0, 10, 2, first_step=14), 14, 20)
    assert not any(answers.values())


def test_windows_may_follow_one_another(tmp_path):
    answers = train_a_little(ProfiledWindows(tmp_path, 0, 3, 2), 0, 7)
    assert {step: sorted(a) for step, a in answers.items() if a} == {2: [1, 2], 5: [4, 5]}


def test_other_ranks_keep_the_trace_but_not_the_account(tmp_path):
    answers = train_a_little(ProfiledWindows(tmp_path, 3, 10, 2), 0, 8)
    assert not any(answers.values())
    timeline = read_kineto(tmp_path / "rank3-step4.json.gz", rank=3)
    assert sorted(accounting(timeline)[3]) == [4, 5]


def test_the_trace_is_kinetos_own_and_knows_its_steps(tmp_path):
    answers = train_a_little(ProfiledWindows(tmp_path, 0, 10, 2, axis="dp"), 0, 8)
    trace = json.loads(gzip.decompress((tmp_path / "rank0-step4.json.gz").read_bytes()))
    names = {event.get("name") for event in trace["traceEvents"]}
    assert {"aten::mm", "paceline.step", "ProfilerStep#1", "ProfilerStep#2"} <= names
    assert trace["paceline"] == {"first_step": 4, "axis": "dp"}
    again = accounting(read_kineto(tmp_path / "rank0-step4.json.gz"))[0]
    assert again == answers[5]


def test_no_windows_no_profiler(tmp_path):
    assert not any(train_a_little(ProfiledWindows(tmp_path, 0, 0), 0, 8).values())
    assert list(tmp_path.iterdir()) == []


def fail_within_a_window(windows):
    with windows:
        for step in range(9):
            if step == 5:
                raise RuntimeError("the loss is gone")
            with record_function("paceline.step"):
                torch.ones(4).sum()
            windows.step()


def test_training_that_stops_within_a_window_leaves_nothing(tmp_path):
    windows = ProfiledWindows(tmp_path, 0, 10, 3)
    with pytest.raises(RuntimeError, match="the loss is gone"):
        fail_within_a_window(windows)
    assert not torch.autograd._profiler_enabled()
    assert list(tmp_path.iterdir()) == []


def test_windows_that_would_overlap_are_refused(tmp_path):
    with pytest.raises(AssertionError, match="into one another"):
        ProfiledWindows(tmp_path, 0, 3, 3)


# --- gloo ranks ---------------------------------------------------------------------------------

WIDTH, VOCABULARY, LENGTH = 128, 512, 64


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.norm2 = nn.RMSNorm(WIDTH), nn.RMSNorm(WIDTH)
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x):
        batch, length, width = x.shape
        qkv = self.qkv(self.norm(x)).view(batch, length, 3, 4, width // 4)
        q, k, v = qkv.permute(2, 0, 3, 1, 4)
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(attended.transpose(1, 2).reshape(batch, length, width))
        return x + self.down(F.silu(self.up(self.norm2(x))))


class Decoder(nn.Module):
    def __init__(self, recompute):
        super().__init__()
        self.embed, self.head = nn.Embedding(VOCABULARY, WIDTH), nn.Linear(WIDTH, VOCABULARY)
        self.blocks = nn.ModuleList(Block() for _ in range(3))
        self.recompute = recompute

    def forward(self, ids):
        x = self.embed(ids)
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False) if self.recompute else block(x)
        return self.head(x)


def wrap(kind, model, world_size):
    if kind == "dp":
        return DistributedDataParallel(model)
    mesh = init_device_mesh("cpu", (world_size,), mesh_dim_names=("fsdp",))
    for block in model.blocks:
        fully_shard(block, mesh=mesh)
    return fully_shard(model, mesh=mesh)


def profiled_steps(rank, world_size, folder, kind, num_micro, recompute, bf16):
    """Train for one window; return rank 0's account and the step times of the trace."""
    torch.manual_seed(0)
    model = wrap(kind, Decoder(recompute), world_size)
    optimizer = torch.optim.AdamW(model.parameters())
    with ProfiledWindows(folder, rank, 100, 3, axis=kind) as windows:
        for _ in range(7):
            with record_function("paceline.step"):
                for micro in range(num_micro):
                    last = micro == num_micro - 1
                    train_micro_batch(model, last, bf16)
                with record_function("paceline.optimizer"):
                    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
                    optimizer.step()
                    optimizer.zero_grad()
            account = windows.step()
    return account


def train_micro_batch(model, last, bf16):
    with record_function("paceline.data_wait"):
        ids = torch.randint(0, VOCABULARY, (4, LENGTH + 1))
    skip_sync = contextlib.nullcontext()
    if isinstance(model, DistributedDataParallel):
        skip_sync = contextlib.nullcontext() if last else model.no_sync()
    else:
        model.set_requires_gradient_sync(last)
    with skip_sync:
        with torch.autocast("cpu", torch.bfloat16, enabled=bf16):
            logits = model(ids[:, :-1]).flatten(0, 1)
        F.cross_entropy(logits.float(), ids[:, 1:].flatten()).backward()


# Name: kind of parallelism, micro-batches, recompute, bf16.
SETTINGS = {
    "ddp": ("dp", 1, False, False),
    "ddp accumulating, recomputing": ("dp", 2, True, False),
    "fsdp accumulating, bf16": ("fsdp", 2, False, True),
}


def all_settings(rank, world_size, folder):
    return {
        name: profiled_steps(rank, world_size, folder / name, *setting)
        for name, setting in SETTINGS.items()
    }


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """Return the folder of traces and what each rank was told, by setting."""
    folder = tmp_path_factory.mktemp("traces")
    return folder, run_ranks(all_settings, 2, folder)


@pytest.mark.parametrize("name", SETTINGS)
def test_the_account_of_real_steps(trained, name):
    folder, (accounts, others) = trained
    kind, _, recompute, _ = SETTINGS[name]
    account = accounts[name]
    assert sorted(account) == [4, 5, 6]
    assert others[name] == {}
    timeline = read_kineto(folder / name / "rank0-step4.json.gz")
    for _, step, start, end in timeline.steps.tolist():
        terms, whole = account[step], (end - start) / 1e9
        assert sum(terms.values()) == pytest.approx(whole, rel=1e-12)
        assert terms.get("unattributed", 0) < 0.03 * whole
        assert ("recompute" in terms) == recompute
        always = {"matmul", "attention", "optimizer", "other_kernels", "data_wait", "host_gap"}
        assert set(terms) - {"recompute"} == always | {f"exposed_comm.{kind}"}


def test_ranks_are_put_side_by_side(trained):
    folder, _ = trained
    traces = sorted((folder / "ddp").iterdir())
    assert len(traces) == 2
    account = read_account(folder / "ddp")
    assert (
        account.terms_ns.sum(axis=1) == account.steps["end_ns"] - account.steps["start_ns"]
    ).all()
    assert account.terms_ns[:, TERM_ID["unattributed"]].sum() == 0
    assert set(account.collectives["micro_batch"]) == {1}
    # One of the two is always the last to come to a collective, and waits for nobody.
    assert (account.collectives["wait_ns"] == 0).sum() >= len(account.collectives) / 2
    assert account.term_s("straggler_wait") > 0
    assert sorted(set(account.path["step"])) == [4, 5, 6]
    both = Timeline.merge([read_kineto(path) for path in traces])
    assert both.ranks == (0, 1)
    assert [sorted(steps) for steps in accounting(both).values()] == [[4, 5, 6]] * 2
