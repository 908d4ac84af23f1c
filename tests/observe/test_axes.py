"""Groups that name no axis get one from their use (files, pure)."""

import json

import pytest

from paceline.observe.recorded import read_account
from paceline.observe.terms import AXES
from tests.observe.test_kineto import NODE, event, kernel, launch, span, step


class Job:
    """A step whose collectives are launched in the forward or the backward pass."""

    def __init__(self):
        self.events = [step(10_000), event("aten::mm", 1, 2, Sequence_number=1)]
        self.at = 10

    def add(self, word, where="forward", said=True, name=None, group="1"):
        at, self.at = self.at, self.at + 20
        args = {"Collective_name": word, "Process_Group_Name": group} if said else {}
        tid = 3 if where == "backward" else 1
        self.events += [
            event(NODE + "MmBackward0", at, at + 8, tid=3, Fwd_thread_id=1)
            if where == "backward"
            else span(where, at, at + 8),
            event("record_param_comms", at + 1, at + 6, tid=tid, **args),
            launch(at + 2, at, tid=tid),
            kernel(name or "ncclDevKernel_Generic_4(ncclArgs)", at + 5, at + 15, at, stream=20),
        ]
        return self

    def run(self, name):
        at, self.at = self.at, self.at + 20
        self.events += [launch(at, at), kernel(name, at + 3, at + 10, at)]
        return self


@pytest.fixture
def axes(tmp_path):
    def of(job, *more):
        path = tmp_path / "trace.json"
        path.write_text(json.dumps({"traceEvents": [*job.events, *more]}))
        rows = read_account(path).collectives
        return {AXES[row["axis"]] if row["axis"] >= 0 else None for row in rows}

    return of


def test_sharded_parameters_are_gathered_and_scattered_in_the_backward_pass(axes):
    job = Job().add("_allgather_base").add("_allgather_base", "backward")
    assert axes(job) == {None}  # gathered alone, it may be anything
    assert axes(job.add("_reduce_scatter_base", "backward")) == {"fsdp"}
    # Parts of sequences are scattered in the forward pass too.
    assert axes(job.add("_reduce_scatter_base", "forward")) == {None}


def test_reductions_in_the_forward_pass_are_of_parts_of_tensors(axes):
    job = Job()
    for _ in range(4):
        job.add("allreduce").add("allreduce", "backward")
    assert axes(job) == {"tp"}
    gradients = Job().add("allreduce", "backward").add("allreduce", "backward")
    assert axes(gradients) == {"dp"}
    assert axes(gradients.add("allreduce")) == {None}  # a loss beside them
    assert axes(gradients.add("allreduce", group="2")) == {None}


def test_stages_send_and_receive(axes):
    assert axes(Job().add("send").add("recv", "backward")) == {"pp"}
    kernel_alone = Job().add("", said=False, name="ncclDevKernel_SendRecv(ncclArgs)")
    assert axes(kernel_alone) == {None}  # NCCL's all-to-all is called so, too


@pytest.mark.parametrize(
    "beside",
    [
        "void split_embedding_codegen_forward_unweighted_kernel<float>(T)",
        "void vllm::moe::topkGatingSoftmax<8, 128>(float const*)",
        "fused_moe_kernel",
    ],
)
def test_exchanges_beside_experts_or_tables_are_theirs(axes, beside):
    job = Job().add("alltoall_base")
    assert axes(job) == {None}  # of sequences, perhaps
    assert axes(job.run(beside)) == {"ep"}


def test_kernels_of_experts_need_no_arguments(axes):
    job = Job().add("", said=False, name="void deep_ep::internode::dispatch<true, 8>(void*)")
    job.add("", said=False, name="void deep_ep::intranode::combine<float, 8>(void*)")
    assert axes(job) == {"ep"}


def test_replicas_broadcast_their_buffers_before_the_forward_pass(axes):
    assert axes(Job().add("broadcast", "DistributedDataParallel.forward")) == {"dp"}
    assert axes(Job().add("broadcast", "setup")) == {None}


def test_an_engine_reduces_over_parts_of_tensors(axes):
    serves = span("execute_context_0(0)_generation_4(4)", 0, 9_000)
    assert axes(Job().add("allreduce"), serves) == {"tp"}
