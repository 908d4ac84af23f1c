"""Stack: the software that runs a step, by its features and the constants they cost.

Two systems run the same layout at different speeds, because one fuses its element-wise kernels, the
other waits for its collectives, a third launches every kernel from Python. A Stack says which, so
that the planner can price our own runtime, and published runs of others, by one set of formulas.

Features are what one can read about a system. Constants are physical and bounded; their defaults
are assumptions, and `paceline.plan.calibrate` fits them to measured steps, never beyond their
bounds. Nothing in here belongs to a single run or a source of runs.
"""

import json
from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import Field, SerializerFunctionWrapHandler, model_serializer

from paceline.config.frozen import FrozenConfig

Part = Literal["mla_up_proj", "mlp", "moe_act", "layernorm", "shared_experts", "core_attn"]


class Stack(FrozenConfig):
    """How a system runs a step. The defaults are those of Paceline's own runtime."""

    attention: Literal["flash1", "flash", "flash3", "unfused"] = "flash"
    """Fused attention never stores the scores. flash1: the first FlashAttention, until mid 2023.
    flash: FlashAttention-2, twice as fast. flash3: FlashAttention-3 and cuDNN, up to twice as fast
    again from Hopper on. Attention that is unfused writes the scores to memory."""
    elementwise: Literal["eager", "fused"] = "eager"
    """Norms, activations and residuals kernel by kernel as PyTorch does, or fused by hand or by a
    compiler (layout.compile fuses them whatever stands here)."""
    launch: Literal["eager", "graph"] = "eager"
    """Whether the host launches each kernel, or replays captured graphs."""
    logits: Literal["fp32", "bf16", "chunked"] = "fp32"
    """The loss: upcast copies of all logits, none, or chunk by chunk."""
    shared_vocab_loss: Literal["narrow", "wide"] = "narrow"
    """Where tp shares the vocabulary and logits are upcast: 16-bit logits wait for the backward
    pass (ours), or log-probabilities in fp32 (DTensor's loss_parallel)."""
    steps_loss: bool = False
    """Whether an upcast loss goes over the logits kernel by kernel (Megatron's vocabulary-parallel
    one), or takes their log-softmax in one (torch's, ours)."""
    grad_dtype: Literal["param", "fp32", "bf16"] = "param"
    """Type of accumulated gradients; "param": that of the stored parameters."""
    states: Literal["shards", "buffers"] = "shards"
    """What data ranks hold under ZeRO-1 and -2. As shards it is a shard of everything; they gather
    the parameters for each step (FSDP2). In buffers it is whole 16-bit parameters, with ZeRO-1 also
    a lasting buffer of whole gradients. Then only what is the optimizer's is sharded (Megatron,
    DeepSpeed)."""
    adds_into_buffer: bool = True
    """With states in buffers: whether products add their gradients to the buffer themselves, in
    its type (Megatron), or beside it 16-bit gradients last too where it is wider (DeepSpeed)."""
    receives_ahead: bool = False
    """Whether a stage has room for what it receives of all micro-batches of a step at once
    (torch.distributed.pipelining's own stages), or only for what is on its way (ours)."""
    regathers_tp: bool = False
    """With sequence parallelism: whether the backward pass gathers again over tp what products
    read (Megatron, https://arxiv.org/abs/2205.05198; XLA), or the gathered tensors are kept
    (DTensor, ours)."""
    optimizer: Literal["fused", "foreach"] = "fused"
    """One kernel over all parameters, or one per operation and group of parameters."""
    overlaps_data_axes: bool = True
    """Whether the collectives of dp and fsdp run beside the computation."""
    overlaps_tp: bool = False
    """Whether tensor parallel collectives run beside the products they feed."""
    overlaps_pp: bool = True
    """Whether activations travel between stages while both compute."""
    scatters_pp: bool = False
    """Whether tp ranks that hold the same activations each send a share of them to the next stage,
    which gathers them (https://arxiv.org/abs/2104.04473, section 4.1)."""
    overlaps_ep: bool = False
    """Whether a forward and a backward pass of two micro-batches are worked on together: then the
    experts' exchanges of each run beside the computing of the other. So do DualPipe
    (https://arxiv.org/abs/2412.19437, section 3.2.1) and Megatron's overlap of MoE's expert
    parallel communication. Schedules without a pass to spare have no such pairs."""
    expert_tp: Literal["tp", "one"] = "tp"
    """Whether the tp ranks share each expert's columns, or hold whole experts."""
    expert_exchange: Literal["copies", "tokens"] = "copies"
    """What travels to the experts: every copy of a token by itself, in an all-to-all (ours). Or a
    token once to each rank, and over the network once to each node, that has any of its experts
    (DeepEP, HybridEP)."""
    dispatch_dtype: Literal["values", "fp8"] = "values"
    """In what tokens travel to fp8 experts and, backward, the gradients of what these gave: as
    values are, or cast before they travel (https://arxiv.org/abs/2412.19437, section 3.3.3). The
    ways back are as values are."""
    fp8_experts: bool = False
    """Whether the experts' products are in fp8 where the linear layers' are (TransformerEngine,
    DeepGEMM, torchao's training of experts), or stay as values are (ours, by torchao's linear
    layers: parallel/fp8.py)."""
    grouped_products: Literal["kernel", "loop"] = "kernel"
    """Whether the products of all experts of a rank are one kernel (torch's and CUTLASS's grouped
    products), or follow each other, expert by expert (TransformerEngine's on cuBLAS)."""
    expert_biases: Literal["none", "eager"] = "none"
    """Whether experts have clamped gates and biases, worked on kernel by kernel as Megatron does
    for gpt-oss; ours have none."""
    fuses_experts: bool = False
    """Whether an expert's activation and casts are parts of its products' kernels (cuDNN's grouped
    products with SwiGLU on Blackwell), or passes over memory of their own."""
    keeps_fp8: bool = False
    """Whether of what fp8 products read an 8-bit copy waits for the backward pass
    (TransformerEngine), or the 16-bit tensor (torchao, ours). Its product is one node of autograd's
    graph: where a backward pass is split in two, both halves find both gradients."""
    weighs_in_experts: bool = False
    """Whether copies of tokens are weighed between an expert's products, so that what experts give
    needn't wait for the backward pass (Megatron since 2025), or afterwards (ours)."""
    channels_last: bool | None = None
    """Whether images lie in memory with their channels together, as tensor cores read them; None:
    as is usual, in 16-bit arithmetic only."""
    dropout: bool = False
    """Whether attention and residuals draw and keep dropout masks."""
    recompute_granularity: Literal["block", "half", "attention"] = "block"
    """What selective recompute means: everything but products (ours), everything but every second
    product (torchtitan), or the attention core alone (Megatron)."""
    recompute_stops_early: bool = True
    """Whether a recomputation ends with the last tensor that backward needs (PyTorch's own does),
    so that a block's last product isn't repeated."""
    gather_dtype: Literal["arithmetic", "fp8"] = "arithmetic"
    """In what fsdp gathers parameters: the type that they are computed with or, where that is fp8,
    cast before they travel."""
    tp_gather_dtype: Literal["values", "fp8"] = "values"
    """In what tp gathers the inputs of fp8 products and, backward, their outputs' gradients: as
    values are, or cast before they travel (torchao with one scale for a tensor)."""
    cp_keys: Literal["ring", "gathered"] = "ring"
    """How a ring of cp brings keys and values to other ranks' queries: hop by hop (ours), or all
    together, with a copy of a key head for each query head (torch's context_parallel)."""

    moments_bytes: Annotated[float, Field(gt=0)] = 8.0
    """Of the optimizer's moments, bytes per parameter where they aren't 8-bit codes: Adam's two in
    fp32 (8), in bf16 (4), or Muon's one in fp32 (4)."""
    keeps_master: bool = True
    """Whether 16-bit parameters have a copy in fp32 that the optimizer works on."""
    gather_unit: Literal["block", "matrix"] = "block"
    """What fsdp gathers and reduces at a time: a block's parameters (FSDP2, ours), or one
    product's, gradients in its arithmetic (XLA)."""
    allocator: Literal["caching", "planned"] = "caching"
    """Whether memory is asked for while a step runs and kept by torch's allocator, or laid out
    before it (XLA), so that there are no holes, and nothing but the program takes any."""
    loads_kernels: Literal["used", "all"] = "used"
    """Of its libraries' kernels, whether a process loads those that it calls, or all, as CUDA did
    before 11.7."""
    remakes: Annotated[tuple[Part, ...], Field(strict=False)] = ()
    """Parts of a block that the backward pass makes anew besides what layout.recompute says
    (Megatron's recompute_modules). They count in memory alone: all are cheap."""
    offloaded_share: Annotated[float, Field(ge=0, le=1)] = 0.0
    """Part of a stage's blocks whose activations wait on the host besides what layout.offload says.
    It counts in memory alone: the copies are taken to be hidden."""

    constants: Mapping[str, Annotated[float, Field(gt=0)]] = Field(default_factory=dict)
    """Fitted values of constants of `CONSTANTS`; the others have their defaults."""
    origin: str = "assumed"
    """Where the constants come from: "assumed", or which steps they were fitted to."""

    @model_serializer(mode="wrap")
    def _stated(self, dumped: SerializerFunctionWrapHandler) -> dict[str, Any]:
        """What a Job or a Cluster file states: what was measured, and how it isn't our runtime."""
        stated = {"constants", "origin", *self.features}
        return {name: value for name, value in dumped(self).items() if name in stated}

    @property
    def features(self) -> dict[str, Any]:
        """Those in which it differs from Paceline's own runtime; none: it is that one."""
        own = Stack()
        return {
            name: value
            for name, value in self
            if name not in ("constants", "origin") and value != getattr(own, name)
        }

    @property
    def whose(self) -> str:
        """Whose runtime it is, in words."""
        told = ", ".join(f"{name} = {json.dumps(value)}" for name, value in self.features.items())
        return f"a runtime with {told} (cluster.stack)" if told else "Paceline's own runtime"


class Constant(FrozenConfig):
    """One physical constant of a stack."""

    default: float
    low: float
    high: float
    meaning: str


def _constant(default: float, low: float, high: float, meaning: str) -> Constant:
    return Constant(default=default, low=low, high=high, meaning=meaning)


CONSTANTS: dict[str, Constant] = {
    "matmul_time": _constant(1.0, 0.7, 2.0, "matrix products, over the device's curve"),
    "conv_time": _constant(1.1, 1.0, 3.0, "convolutions, over the matrix product they imply"),
    "attention_time": _constant(1.0, 0.5, 4.0, "attention kernels, over the device's curve"),
    "memory_time": _constant(1.0, 0.5, 4.0, "memory-bound kernels, over bytes / bandwidth"),
    # A launch alone takes 4-6 us; from one to the next, with Python, dispatch and autograd, traces
    # of training have, in the mean of a thread without gaps above 2 ms, 35 and 55 us (A100), 45, 46
    # (H800), 32 (H100), 17 and 27 (MI300X): tests/published/test_host.py.
    "launch_us": _constant(40.0, 0.5, 100.0, "host time per launched kernel, microseconds"),
    "optimizer_time": _constant(1.0, 0.5, 6.0, "the optimizer's step, over its bytes / bandwidth"),
    "comm_time_inside": _constant(1.0, 0.6, 3.0, "collectives inside the fast tier, over curves"),
    "comm_time_across": _constant(1.0, 0.6, 4.0, "collectives across nodes, over curves"),
    "overlap_slowdown": _constant(1.15, 1.0, 1.5, "computing beside a collective, over alone"),
    "overlap_share": _constant(0.9, 0.05, 1.0, "part of what could be hidden that really is"),
    # A few per mille to some per cent between devices of one node, by temperature and silicon.
    "rank_spread": _constant(0.01, 0.0005, 0.05, "standard deviation of ranks' work, over mean"),
    # PCIe 4.0 x16 carries 25 of its 32 GB/s; GH200 and GB200 have ten times as much.
    "host_copy_gb_per_s": _constant(22.0, 2.0, 450.0, "copies between host and device, GB/s"),
    # What Python does around a collective, beyond what a curve of it has: DTensor's dispatch of the
    # operators between exchanges, FSDP2's hooks with their copies; less around plain sends. Counted
    # on CPUs, where the same cores compute; beside other devices it is part of launching, which
    # runs ahead of them. On all hosts, around every operator of a block that recomputes: hooks of
    # what autograd saves, or, where it is selective, the choice.
    "exchange_us": _constant(200.0, 5.0, 2000.0, "host time per exchange in layers on CPUs, us"),
    "hop_us": _constant(200.0, 5.0, 2000.0, "host time per send or ring's hop on CPUs, us"),
    "again_us": _constant(40.0, 0.5, 400.0, "host time per operator recomputed, us"),
    # gloo copies and posts on the cores that compute: 7 Gbit/s over sockets of two vCPUs.
    "socket_gb_per_s": _constant(
        0.9, 0.1, 20.0, "what a CPU rank sends while it does nothing else"
    ),
    "select_us": _constant(40.0, 1.0, 400.0, "host time per choice what to keep, us"),
    "unit_us": _constant(300.0, 5.0, 3000.0, "host time per gather or reduction on CPUs, us"),
    "step_overhead_ms": _constant(2.0, 0.01, 200.0, "host work once per step, milliseconds"),
    "micro_batch_overhead_ms": _constant(0.5, 0.001, 50.0, "host work once per micro-batch, ms"),
}


def constant(stack: Stack, name: str) -> float:
    """The value of a constant of `CONSTANTS` in a stack."""
    return stack.constants.get(name, CONSTANTS[name].default)
