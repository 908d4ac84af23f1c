"""Published runs as layouts: words, numbers and whole lines of tables, pure functions only."""

from pathlib import Path

import pytest

from paceline.config.errors import InputError
from paceline.published import ImageWork, LanguageWork, PublishedRun, read_runs
from paceline.published.layouts import even_split
from paceline.published.machines import device_of, link_bytes_per_s, network_gbit_per_s
from paceline.published.software import software_of, year_of
from paceline.published.table import PublishedLine

GPT = {
    "framework": "Megatron-LM 2021",
    "gpu": "A100-80GB",
    "gpus": "16",
    "gpus_per_node": "8",
    "layers": "24",
    "hidden": "2048",
    "heads": "16",
    "seq": "1024",
    "global_batch_seqs": "64",
    "micro_batch": "2",
    "tp": "2",
    "pp": "2",
    "dp": "4",
    "precision": "fp16 mixed",
    "activation_ckpt": "full",
    "step_time_s": "1.5",
}


def table(folder: Path, *rows: dict[str, str], name: str = "runs.csv") -> Path:
    columns = list(dict.fromkeys(key for row in rows for key in row))
    cells = [[row.get(column, "") for column in columns] for row in rows]
    quoted = [[f'"{cell}"' if "," in cell else cell for cell in row] for row in cells]
    lines = [",".join(columns), *map(",".join, quoted)]
    path = folder / name
    path.write_text("\n".join(lines) + "\n")
    return path


def only_run(folder: Path, **changes: str) -> PublishedRun:
    (run,) = read_runs([table(folder, {**GPT, **changes})])
    return run


def work_of(folder: Path, **changes: str) -> LanguageWork:
    run = only_run(folder, **changes)
    assert isinstance(run.work, LanguageWork), run.reason
    return run.work


def line(**cells: str) -> PublishedLine:
    return PublishedLine("here:2", "here", cells)


@pytest.mark.parametrize(
    ("label", "name"),
    [
        ("A100-80GB", "A100-80"),
        ("NVIDIA A100-SXM4-40GB", "A100-40"),
        ("A100", "A100-80"),
        ("H100 80GB", "H100-SXM"),
        ("H100-SXM5", "H100-SXM"),
        ("H200 SXM 141GB", "H200"),
        ("GB200", "GB200"),
        ("RTX4090", "RTX-4090"),
        ("V100-32GB", "V100"),
        ("H100 SXM5 80GB", "H100-SXM"),
        ("H100 80GB PCIe", "H100-PCIe"),
        ("A100-SXM-80GB", "A100-80"),
        ("A100-SXM4-40GB", "A100-40"),
        ("DGX A100 80GB", "A100-80"),
        ("HGX H100", "H100-SXM"),
        ("DGX-1 V100 16GB", "V100-16"),
        ("GB200 NVL72", "GB200"),
        ("NVIDIA GH200 480GB", "GH200-96"),
        ("GH200 144GB", None),
        ("H800", "H800-80"),
        ("A100 64GB", None),
        ("V100-SXM2-32GB", "V100"),
        ("L40S 48GB", "L40S"),
        ("H100 NVL", None),  # a cut-down part
        ("H100 NVL 94GB", None),
        ("H100-64GB", None),
        ("B200X", None),
        ("Z9000", None),
    ],
)
def test_labels_are_matched_whole(label: str, name: str | None) -> None:
    device = device_of(label)
    assert (device and device.name) == name


@pytest.mark.parametrize(
    ("text", "gbit"),
    [
        ("4x Omni-Path 100 Gb/s per node (Jean Zay)", 50),
        ("8x200Gb/s IB HDR", 200),
        ("8x400Gb/s IB NDR per node (spec; not stated)", 400),
        ("1600 Gbps RoCE per node", 200),
        ("3200 Gbps (8x400G) IB/RoCE per node", 400),
        ("800Gb/s per GPU between NVL72 racks (spec; not stated)", 800),
        ("8x400Gb/s RDMA per host (400 Gb/s per GPU)", 400),
        ("not stated", None),
        ("", None),
        ("DCN between slices", None),
        ("800 Gb/s per VM", 100),
        ("3.2 Tbit/s per instance", 400),
        ("3200 Gbps EFA", 400),  # no card has as much
        ("50 GB/s per GPU", 400),  # bytes
        ("400 Gbit/s InfiniBand", 400),
        ("NDR 400Gb/s/GPU", 400),
    ],
)
def test_network_texts(text: str, gbit: float | None) -> None:
    assert network_gbit_per_s(text, per_node=8) == gbit


def test_link_texts() -> None:
    assert link_bytes_per_s("NVLink3 600GB/s/GPU bidir + NVSwitch (HGX)") == 300e9
    assert link_bytes_per_s("PCIe Gen4 x16") == 25e9
    assert link_bytes_per_s("NVLink5") is None


def test_nodes_of_a_line_are_nodes_that_are_built(tmp_path: Path) -> None:
    """Of devices that don't fill nodes of eight, as many to a node as divide them."""
    plain = {"gpu": "H100", "tp": "1", "pp": "1", "micro_batch": "1"}
    odd = work_of(tmp_path, **plain, gpus="12", dp="12", global_batch_seqs="12").setting.cluster
    assert (odd.devices_per_node, odd.num_nodes) == (4, 3)
    run = only_run(tmp_path, gpu="H100", gpus_per_node="16")
    assert run.reason == "no nodes of 16 H100-SXM"


def test_the_network_of_a_line_becomes_a_tier(tmp_path: Path) -> None:
    cluster = work_of(tmp_path, interconnect_inter="4x Omni-Path 100 Gb/s per node").setting.cluster
    assert cluster.tiers[-1].bytes_per_s.value == pytest.approx(6.25e9)
    assert cluster.tiers[-1].bytes_per_s.origin == "cited"
    assert "network" in work_of(tmp_path).inferred


@pytest.mark.parametrize(
    ("cells", "expected"),
    [
        ({"release": "2024-12"}, 2024 + 11 / 12),
        ({"release": "Apr-2021"}, 2021),
        ({"release": "26.04.01"}, 2026.25),
        ({"framework": "PyTorch 21.11"}, 2021 + 10 / 12),
        ({"framework": "something"}, 2023.5),
        ({}, 2021),
    ],
)
def test_years(cells: dict[str, str], expected: float) -> None:
    assert year_of(line(**cells)) == pytest.approx(expected)


def test_software_goes_by_features() -> None:
    early = software_of(line(framework="Megatron-LM 2021", precision="fp16 mixed"))
    assert early.stack.attention == "unfused"
    assert early.stack.elementwise == "fused"
    assert not early.stack.overlaps_data_axes
    assert early.param_dtype == "bf16"
    modern = software_of(
        line(
            framework="Megatron-Bridge",
            release="26.04",
            gpu="H100-80GB",
            precision="mxfp8 (1x32)",
            compile_flash_flags="TransformerEngine fused/flash attention; "
            "cuda_graph=full_iteration(); moe_a2a_overlap",
        )
    )
    assert modern.stack.attention == "flash3"
    assert modern.stack.launch == "graph"
    assert modern.stack.overlaps_ep
    assert modern.precision == "fp8"
    titan = software_of(
        line(
            framework="torchtitan",
            release="2024-12",
            precision="bf16",
            fsdp_or_zero="FSDP2",
            compile_flash_flags="torch.compile; AsyncTP",
        )
    )
    assert titan.compile
    assert titan.async_tp
    assert titan.stack.attention == "flash"
    assert titan.param_dtype == "fp32"
    none = software_of(
        line(framework="X", release="2025", compile_flash_flags="no flash attention")
    )
    assert none.stack.attention == "unfused"
    eager = software_of(
        line(framework="X + FSDP", compile_flash_flags="flash-attn; no torch.compile")
    )
    assert not eager.compile
    assert eager.stack.elementwise == "eager"


@pytest.mark.parametrize(
    ("cells", "attention"),
    [
        ({"release": "2022-11"}, "flash1"),
        ({"release": "2023-06"}, "flash1"),
        ({"release": "2023-08"}, "flash"),
        ({"release": "2023-08", "compile_flash_flags": "SDPA flash"}, "flash1"),
        ({"release": "2024-05", "compile_flash_flags": "SDPA flash"}, "flash"),
        ({"release": "2022-11", "compile_flash_flags": "flash-attn 2"}, "flash"),
        ({"compile_flash_flags": "flash-attn; triton on older devices"}, "flash1"),
        ({"compile_flash_flags": "flash_attn v1"}, "flash1"),
        ({"release": "2025", "compile_flash_flags": "flash attention in Triton"}, "flash"),
        ({"compile_flash_flags": "flash-attn"}, "flash"),  # undated
        ({"release": "2022-11", "gpu": "TPU v4"}, "flash"),  # never ran there
        ({"release": "2025", "gpu": "V100-32GB"}, "flash1"),  # the second needs Ampere
        ({"release": "2021-11"}, "unfused"),
        ({"release": "2024", "compile_flash_flags": "cuDNN attention"}, "flash"),
        ({"release": "2024", "compile_flash_flags": "cuDNN attention", "gpu": "H200"}, "flash3"),
    ],
)
def test_attention_goes_by_what_is_said_and_by_the_date(
    cells: dict[str, str], attention: str
) -> None:
    found = software_of(line(**{"framework": "X + FSDP", "gpu": "A100-80GB", **cells}))
    assert found.stack.attention == attention


@pytest.mark.parametrize(
    ("cells", "elementwise"),
    [
        ({"framework": "PyTorch 21.11 (NVIDIA DLE)", "workload": "mlm"}, "fused"),
        ({"framework": "NVIDIA DeepLearningExamples"}, "fused"),
        ({"framework": "FlashAttention repo"}, "fused"),
        ({"framework": "PyTorch on NVIDIA DGX"}, "eager"),
        ({"framework": "PyTorch (NVIDIA DLE)", "images_per_s": "6000"}, "eager"),
        (
            {
                "framework": "TensorFlow 1 (NVIDIA DLE)",
                "images_per_s": "6000",
                "compile_flags": "XLA",
            },
            "fused",
        ),
    ],
)
def test_fused_kernels_go_by_the_documented_system_not_by_the_vendor(
    cells: dict[str, str], elementwise: str
) -> None:
    assert software_of(line(**cells)).stack.elementwise == elementwise


@pytest.mark.parametrize(
    ("precision", "flags", "data", "tensors"),
    [
        ("bf16", "torch.compile", "arithmetic", "values"),
        ("fp8 (float8 linears)", "torch.compile; float8 all-gather", "fp8", "fp8"),
        ("fp8 tensorwise, fp8 all-gather", "torch.compile", "fp8", "fp8"),
        ("fp8 tensorwise", "torch.compile", "arithmetic", "fp8"),
        ("fp8 rowwise", "torch.compile", "arithmetic", "values"),
        ("mxfp8", "torch.compile", "arithmetic", "values"),
    ],
)
def test_what_is_gathered_in_eight_bits(
    precision: str, flags: str, data: str, tensors: str
) -> None:
    cells = {"framework": "torchtitan", "precision": precision, "compile_flash_flags": flags}
    stack = software_of(line(**cells)).stack
    assert (stack.gather_dtype, stack.tp_gather_dtype) == (data, tensors)
    assert stack.cp_keys == "gathered"
    others = software_of(line(**{**cells, "framework": "Megatron-LM"})).stack
    assert (others.tp_gather_dtype, others.cp_keys) == ("values", "ring")


def test_transformer_engines_products_keep_eight_bits_in_any_system() -> None:
    cells = {"framework": "Y + FSDP", "precision": "fp8 (TransformerEngine amp_fp8)"}
    found = software_of(line(**cells)).stack
    assert found.keeps_fp8
    assert found.elementwise == "eager"
    assert not software_of(line(**{**cells, "precision": "fp8"})).stack.keeps_fp8
    assert not software_of(line(**{**cells, "precision": "bf16"})).stack.keeps_fp8


def test_asynchronous_tensor_parallelism_is_the_compilers() -> None:
    found = software_of(line(framework="torchtitan", compile_flash_flags="Float8 + Async TP"))
    assert found.async_tp
    assert found.compile
    assert not software_of(line(framework="torchtitan", compile_flash_flags="Float8")).compile


def test_software_does_not_look_at_the_source() -> None:
    cells = {"framework": "Y + FSDP", "precision": "bf16", "release": "2023"}
    one = software_of(line(**cells, source_group="llm-foundry", source="mosaicml"))
    other = software_of(line(**cells, source_group="elsewhere", source="unheard of"))
    assert one == other


def test_a_line_becomes_a_layout(tmp_path: Path) -> None:
    run = only_run(tmp_path)
    assert isinstance(run.work, LanguageWork)
    layout, setting = run.work.layout, run.work.setting
    assert (layout.dp, layout.fsdp, layout.tp, layout.pp) == (4, 1, 2, 2)
    assert layout.schedule == "1f1b"
    assert layout.split == (12, 12)
    assert layout.recompute == "full"
    assert setting.global_batch == 64
    assert run.step_s == pytest.approx(1.5)
    assert not setting.model.gated


def test_what_is_missing_is_inferred_and_named(tmp_path: Path) -> None:
    work = work_of(tmp_path, dp="", micro_batch="", vocab="")
    assert work.layout.dp == 4
    assert work.layout.micro_batch == 1
    assert {"dp", "micro_batch", "vocab"} <= set(work.inferred)


def test_sharding(tmp_path: Path) -> None:
    plain = {"tp": "1", "pp": "1", "dp": "16"}
    full = work_of(tmp_path, **plain, fsdp_or_zero="FSDP FULL_SHARD (ZeRO-3)").layout
    assert (full.dp, full.fsdp, full.zero) == (1, 16, 3)
    group = work_of(tmp_path, **plain, fsdp_or_zero="FSDP2 x8 (ZeRO-3)").layout
    assert (group.dp, group.fsdp, group.zero) == (2, 8, 3)
    first = work_of(tmp_path, fsdp_or_zero="Megatron distributed optimizer (ZeRO-1)").layout
    assert (first.dp, first.fsdp, first.zero) == (1, 4, 1)
    none = work_of(tmp_path, fsdp_or_zero="none (DDP)").layout
    assert (none.dp, none.fsdp, none.zero) == (4, 1, 0)


@pytest.mark.parametrize(
    ("cells", "replicas", "shards", "zero"),
    [
        ({"fsdp_or_zero": "HSDP"}, 2, 8, 3),  # a node
        ({"fsdp_or_zero": "FSDP HYBRID_SHARD"}, 2, 8, 3),
        ({"fsdp_or_zero": "HSDP 4x4"}, 4, 4, 3),
        ({"fsdp_or_zero": "HSDP, shard size 4"}, 4, 4, 3),
        ({"fsdp_or_zero": "HSDP", "notes": "dp_replicate 4; dp_shard 4"}, 4, 4, 3),
        ({"fsdp_or_zero": "_HYBRID_SHARD_ZERO2"}, 2, 8, 2),
        ({"fsdp_or_zero": "HSDP", "gpus_per_node": "4"}, 4, 4, 3),
    ],
)
def test_hybrid_sharding(
    tmp_path: Path, cells: dict[str, str], replicas: int, shards: int, zero: int
) -> None:
    """States are sharded in groups, of a node where nothing else is said, and not replicated."""
    found = work_of(tmp_path, tp="1", pp="1", dp="16", framework="X + FSDP", **cells).layout
    assert (found.dp, found.fsdp, found.zero) == (replicas, shards, zero)


def test_selective_recompute_has_several_meanings(tmp_path: Path) -> None:
    def recompute(notes: str, kind: str = "selective") -> tuple[str, object]:
        layout = work_of(tmp_path, activation_ckpt=kind, notes=notes).layout
        return layout.recompute, layout.recompute_layers

    assert recompute("") == ("selective", "all")
    assert recompute("AC: every 2nd layer") == ("full", 6)
    assert recompute("recompute modules (preset): mla_up_proj; more") == ("none", "all")
    assert recompute("", "none") == ("none", "all")
    assert recompute("every other layer") == ("full", 6)
    assert recompute("selective 1/3") == ("full", 4)
    assert recompute("full-block on first 3 layers of each stage", "full") == ("full", 3)
    assert recompute("recompute_method uniform", "full") == ("full", "all")
    # Two thirds of GPT's products are in its feed-forward layers.
    assert recompute("mlp recompute") == ("full", 8)


@pytest.mark.parametrize(
    ("column", "notes", "found"),
    [
        ("", "full activation recompute; more", "full"),
        ("", "gradient checkpointing on", "full"),
        ("", "no recompute", "none"),
        ("", "activation checkpointing: selective", "selective"),
        ("true", "", "full"),
        ("False", "", "none"),
        ("full (uniform, 1 layer)", "", "full"),
        ("selective (core_attn)", "", "selective"),
    ],
)
def test_recompute_stands_in_notes_too(tmp_path: Path, column: str, notes: str, found: str) -> None:
    """And in other words than none, selective and full."""
    work = work_of(tmp_path, activation_ckpt=column, notes=notes)
    assert work.layout.recompute == found
    assert "activation_ckpt" not in work.inferred


@pytest.mark.parametrize(
    ("notes", "parts", "share"),
    [
        ("recompute modules (preset): mla_up_proj,moe_act", ("mla_up_proj", "moe_act"), 0.0),
        ("recompute layernorm+moe_act", ("moe_act", "layernorm"), 0.0),
        ("OOM: recompute_modules=moe_act: out of memory", (), 0.0),
        ("moe_act is fused", (), 0.0),
        ("activation CPU offload of 6 layers (preset)", (), 0.5),
        ("activation offload", (), 1.0),
        ("no activation offload", (), 0.0),
    ],
)
def test_parts_made_anew_and_activations_on_the_host(
    tmp_path: Path, notes: str, parts: tuple[str, ...], share: float
) -> None:
    """Of 24 layers on two stages."""
    stack = work_of(tmp_path, activation_ckpt="none", notes=notes).setting.stack
    assert (stack.remakes, stack.offloaded_share) == (parts, share)


@pytest.mark.parametrize(
    ("cells", "grads", "moments"),
    [
        ({"framework": "Megatron-LM", "release": "2025"}, "fp32", 8),
        ({"framework": "Megatron-LM", "release": "2025", "precision": "fp8"}, "bf16", 8),
        ({"framework": "NeMo / Megatron-Core", "release": "24.07"}, "bf16", 8),
        ({"framework": "Megatron-Bridge", "release": "26.04"}, "bf16", 8),
        ({"framework": "Megatron-Bridge", "model": "deepseek-v3"}, "fp32", 4),
        ({"framework": "Megatron-Bridge", "release": "26.04", "model": "deepseek-v3"}, "bf16", 4),
        (
            {
                "framework": "Megatron-Bridge",
                "release": "26.04",
                "notes": "fp32 grads and optimizer states",
                "model": "kimi-k2",
            },
            "fp32",
            8,
        ),
        ({"framework": "Megatron-LM", "notes": "bf16 grads and Adam moments"}, "bf16", 4),
        ({"framework": "Megatron-LM", "notes": "grad_reduce_in_fp32=False"}, "bf16", 8),
        ({"framework": "Megatron-LM", "notes": "Muon optimizer"}, "fp32", 4),
        ({"framework": "X + FSDP"}, "param", 8),
        ({"framework": "DeepSpeed"}, "fp32", 8),
        ({"framework": "DeepSpeed", "fsdp_or_zero": "ZeRO-2"}, "bf16", 8),
        ({"framework": "X trainer", "fsdp_or_zero": "ZeRO-3"}, "bf16", 8),
        ({"framework": "X trainer", "fsdp_or_zero": "ZeRO-3", "precision": "fp32"}, "param", 8),
        ({"framework": "DeepSpeed", "fsdp_or_zero": "ZeRO-1", "notes": "fp32 grads"}, "fp32", 8),
        ({"framework": "torchtune"}, "param", 4),
    ],
)
def test_types_of_gradients_and_moments(cells: dict[str, str], grads: str, moments: float) -> None:
    stack = software_of(line(**{"precision": "bf16", **cells})).stack
    assert (stack.grad_dtype, stack.moments_bytes) == (grads, moments)


@pytest.mark.parametrize(
    ("cells", "state", "offload"),
    [
        ({"notes": "8-bit AdamW"}, "8bit", ()),
        ({"notes": "8-bit/paged optimizer; more"}, "8bit", ()),
        ({"notes": "adamw_8bit"}, "8bit", ()),
        ({"precision": "fp8; 8-bit gather"}, "full", ()),
        ({"fsdp_or_zero": "ZeRO-2 + optimizer offload"}, "full", ("optimizer",)),
        ({"fsdp_or_zero": "ZeRO-Offload"}, "full", ("optimizer",)),
        ({"notes": "no optimizer offload"}, "full", ()),
    ],
)
def test_states_in_codes_or_on_the_host(
    tmp_path: Path, cells: dict[str, str], state: str, offload: tuple[str, ...]
) -> None:
    layout = work_of(tmp_path, **{"gpu": "H100", **cells}).layout
    assert (layout.optimizer_state, layout.offload) == (state, offload)


@pytest.mark.parametrize(
    ("flags", "compiled"),
    [
        ("torch.compile", True),
        ("torch.compile per block", True),
        ("no compile", False),
        ("no torch.compile", False),
        ("without compile", False),
        ("compile off", False),
        ("torch.compile=False", False),
        ("not compiled; SDPA flash", False),
        ("compile not stated", False),
    ],
)
def test_compilers_that_are_denied(flags: str, compiled: bool) -> None:
    assert software_of(line(framework="torchtitan", compile_flash_flags=flags)).compile == compiled


@pytest.mark.parametrize(
    ("cells", "micro_batch", "steps"),
    [
        ({"grad_accum": "4"}, 4, 4),
        ({"grad_accum": "16"}, 1, 16),
        ({"notes": "gradient accumulation steps = 8"}, 2, 8),
        ({"tp": "1", "pp": "1", "dp": "16", "grad_accum": "2"}, 2, 2),
    ],
)
def test_accumulation_says_what_a_micro_batch_is(
    tmp_path: Path, cells: dict[str, str], micro_batch: int, steps: int
) -> None:
    """Of 64 samples over data ranks: nothing is left to infer, with a pipeline or without."""
    run = only_run(tmp_path, **{"micro_batch": "", **cells})
    assert isinstance(run.work, LanguageWork)
    layout = run.work.layout
    assert layout.micro_batch == micro_batch
    assert micro_batch * steps * layout.num_data_ranks == 64
    assert "micro_batch" not in run.work.inferred
    assert not run.is_memory_open


def test_a_large_share_is_no_single_micro_batch(tmp_path: Path) -> None:
    """Where neither is stated, as many of a rank's 256 samples of 4,096 tokens as 16,384 hold."""
    plain = {"tp": "1", "pp": "1", "dp": "16", "micro_batch": "", "seq": "4096"}
    work = work_of(tmp_path, **plain, global_batch_seqs="4096")
    assert work.layout.micro_batch == 4
    assert "micro_batch" in work.inferred
    assert work_of(tmp_path, **plain, global_batch_seqs="48").layout.micro_batch == 3


@pytest.mark.parametrize(
    "cells",
    [
        {"workload": "qlora"},
        {"workload": "sft", "notes": "LoRA r=8"},
        {"model": "llama3-70b-lora"},
        {"framework": "HF + PEFT"},
        {"notes": "adapters of rank 8"},
    ],
)
def test_adapters_are_named_wherever_they_stand(tmp_path: Path, cells: dict[str, str]) -> None:
    """They are no full training, in whatever column it is said."""
    assert work_of(tmp_path, **cells).setting.finetune.is_adapted


@pytest.mark.parametrize(
    ("words", "tuned", "inferred"),
    [
        ("LoRA r=16", {"rank": 16}, ["adapter targets"]),
        ("lora_r: 64; q_proj,v_proj", {"rank": 64, "targets": ("q_proj", "v_proj")}, []),
        (
            "LoRA attention-only rank 8, packed",
            {"rank": 8, "targets": ("attention.*",)},
            [],
        ),
        ("LoRA rank-4 on all linear layers", {"rank": 4, "targets": ("*_proj",)}, []),
        (
            "LoRA of dim=32 on linear_qkv and linear_proj",
            {"rank": 32, "targets": ("q_proj", "k_proj", "v_proj", "o_proj")},
            [],
        ),
        ("LoRA on q and v", {"targets": ("q_proj", "v_proj")}, ["adapter rank"]),
        ("QLoRA rank 64", {"base": "nf4_double", "targets": ("*_proj",)}, ["adapter targets"]),
        ("LoRA r=8, bnb.nf4", {"base": "nf4", "targets": ("*_proj",)}, ["adapter targets"]),
        ("DoRA r=8", {"decomposed": True}, ["adapter targets"]),
        ("LoRA", {"rank": 32, "targets": ("*_proj",)}, ["adapter rank", "adapter targets"]),
        (
            "LoRA; flags from preset LLAMA3_70B_LORA_CONFIG_H100_FP8_CS_V1",
            {"rank": 16, "targets": ("q_proj", "k_proj", "v_proj")},
            ["adapter rank", "adapter targets"],
        ),
    ],
)
def test_rank_and_matrices_are_read_or_named_as_inferred(
    tmp_path: Path, words: str, tuned: dict[str, object], inferred: list[str]
) -> None:
    work = work_of(tmp_path, notes=words, framework="Megatron-Bridge 26.06")
    found = work.setting.finetune
    assert {name: getattr(found, name) for name in tuned} == tuned
    assert [name for name in work.inferred if name.startswith("adapter")] == inferred


@pytest.mark.parametrize(
    ("framework", "rank", "targets"),
    [
        ("NeMo / Megatron-Core 24.07", 32, ("q_proj", "k_proj", "v_proj")),
        ("NeMo 25.04", 32, ("*_proj",)),
        ("LitGPT LoRA", 8, ("q_proj", "v_proj")),
        ("HF transformers + PEFT FSDP", 8, ("q_proj", "v_proj")),
        ("torchtune", 8, ("q_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")),
    ],
)
def test_what_is_not_said_of_adapters_is_the_default_of_the_system(
    tmp_path: Path, framework: str, rank: int, targets: tuple[str, ...]
) -> None:
    work = work_of(tmp_path, framework=framework, workload="lora")
    assert (work.setting.finetune.rank, work.setting.finetune.targets) == (rank, targets)
    assert {"adapter rank", "adapter targets"} <= set(work.inferred)


@pytest.mark.parametrize(
    ("words", "reason"),
    [
        ("prefix tuning", "adapters of another kind than LoRA"),
        ("p-tuning, 20 virtual tokens", "adapters of another kind than LoRA"),
        ("LLaMA-Adapter", "adapters of another kind than LoRA"),
        ("PEFT: prompt tuning", "adapters of another kind than LoRA"),
        ("LoRA r=8, load_in_8bit", "8-bit matrices beside adapters"),
    ],
)
def test_adapters_that_are_not_planned_say_why(tmp_path: Path, words: str, reason: str) -> None:
    run = only_run(tmp_path, notes=words)
    assert (run.work, run.reason) == (None, reason)


def test_a_large_run_of_adapters_is_faster_than_one_of_everything(tmp_path: Path) -> None:
    """A small one is not: the host launches three times as many products."""
    large = {"hidden": "8192", "ffn": "28672", "heads": "64", "seq": "4096"}
    full, tuned = (work_of(tmp_path, workload=each, **large) for each in ("pretrain", "lora"))
    assert tuned.seconds({}) < full.seconds({})
    assert tuned.stack_key != full.stack_key


def test_litgpt_recomputes_blocks_where_it_fine_tunes_on_several_devices(tmp_path: Path) -> None:
    said = {"framework": "LitGPT", "activation_ckpt": "", "tp": "1", "pp": "1"}
    for workload, gpus, recompute in (("lora", "8", "full"), ("pretrain", "8", "none")):
        work = work_of(tmp_path, workload=workload, dp=gpus, gpus=gpus, **said)
        assert work.layout.recompute == recompute
        assert "activation_ckpt" in work.inferred


def test_full_training_beside_adapters_is_predicted(tmp_path: Path) -> None:
    assert only_run(tmp_path, workload="sft", notes="full, not LoRA").work is not None
    assert only_run(tmp_path, notes="published FLOPs for SFT/LoRA omit attention").work is not None


def test_experts_and_latent_attention(tmp_path: Path) -> None:
    model = work_of(
        tmp_path,
        framework="Megatron-Bridge",
        hidden="7168",
        heads="128",
        head_dim="192",
        experts="256",
        topk="8",
        moe_ffn="2048",
        shared_ffn="2048",
        dense_layers="3",
        layers="61",
        ffn="18432",
        vocab="129280",
        gated_mlp="true",
        tied_emb="false",
        pp="1",
        dp="8",
        ep="8",
    ).setting.model
    # What the network's authors state: 671 B parameters.
    assert model.num_params == pytest.approx(671e9, rel=0.005)
    # Its tokens choose four of eight groups first, and not more nodes than these are on.
    assert model.experts is not None
    assert (model.experts.num_groups, model.experts.groups_per_token) == (8, 4)


def test_batches_that_do_not_close_are_rounded_or_refused(tmp_path: Path) -> None:
    work = work_of(tmp_path, global_batch_seqs="65")
    assert work.setting.global_batch == 64
    assert "num_micro_batches" in work.inferred
    # Tokens per second are what was published: the step is as much shorter.
    assert only_run(tmp_path, global_batch_seqs="65").step_s == pytest.approx(1.5 * 64 / 65)
    assert only_run(tmp_path, dp="3").reason == "ranks don't close"


def test_surplus_data_ranks_share_sequences(tmp_path: Path) -> None:
    layout = work_of(tmp_path, global_batch_seqs="2", micro_batch="").layout
    assert (layout.num_data_ranks, layout.cp) == (2, 2)


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"gpu": "Z9000"}, "unknown device Z9000"),
        ({"layers": ""}, "no shapes"),
        ({"seq": ""}, "no sequence length"),
        ({"notes": "hybrid Mamba2/attention"}, "state-space layers"),
        ({"workload": "prefix-tuning"}, "adapters of another kind than LoRA"),
        ({"tp": "", "pp": "", "dp": "", "framework": "unheard of"}, "no layout"),
        ({"step_time_s": ""}, "nothing measured"),
        ({"precision": "fp4"}, "no fp4 on A100-80"),
    ],
)
def test_what_cannot_be_predicted_says_why(
    tmp_path: Path, changes: dict[str, str], reason: str
) -> None:
    run = only_run(tmp_path, **changes)
    assert run.work is None
    assert run.reason == reason


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"gpus": "nan"}, "runs.csv:2: gpus = 'nan'"),
        ({"hidden": "wide"}, "hidden = 'wide'"),
        ({"layers": "24.5"}, "whole number"),
        ({"step_time_s": "-1"}, "step_time_s = '-1'"),
        ({"step_time_s": "inf"}, "step_time_s = 'inf'"),
        ({"sp": "maybe"}, "true or false"),
    ],
)
def test_wrong_cells_name_line_and_column(
    tmp_path: Path, changes: dict[str, str], words: str
) -> None:
    with pytest.raises(InputError, match=words.replace("(", r"\(")):
        only_run(tmp_path, **changes)


def test_files_that_are_no_tables(tmp_path: Path) -> None:
    for name, text in (("empty.csv", ""), ("other.csv", "a,b\n1,2\n")):
        path = tmp_path / name
        path.write_text(text)
        with pytest.raises(InputError, match="is not a table of runs"):
            read_runs([path])
    with pytest.raises(InputError, match="does not exist"):
        read_runs([tmp_path / "absent.csv"])
    binary = tmp_path / "binary.csv"
    binary.write_bytes(b"\xff\xfe\x00")
    with pytest.raises(InputError, match="UTF-8"):
        read_runs([binary])
    twice = tmp_path / "twice.csv"
    twice.write_text("gpus,gpus\n1,2\n")
    with pytest.raises(InputError, match="stands twice"):
        read_runs([twice])
    wide = tmp_path / "wide.csv"
    wide.write_text("gpus,step_time_s\n1,2,3\n")
    with pytest.raises(InputError, match="3 cells under 2 columns"):
        read_runs([wide])


def test_experts_are_even_but_where_tokens_choose_freely(tmp_path: Path) -> None:
    forced, natural = (
        work_of(tmp_path, experts="8", topk="2", moe_ffn="64", notes=notes).setting.expert_imbalance
        for notes in ("MoE force-balanced tokens", "real data; NATURAL routing")
    )
    assert (forced, natural) == (1.0, 1.2)


def test_short_tables_are_megatron_gpt(tmp_path: Path) -> None:
    short = {k: GPT[k] for k in ("gpus", "global_batch_seqs", "micro_batch", "hidden", "heads")}
    rest = {k: GPT[k] for k in ("layers", "seq", "tp", "dp", "pp")}
    path = table(tmp_path, {**short, **rest, "step_time_ms": "1500"}, name="some_a100_runs.csv")
    (run,) = read_runs([path])
    assert run.work is not None
    assert run.work.device.name == "A100-80"
    assert run.work.layout.recompute == "full"
    assert run.work.software.stack.steps_loss
    assert run.step_s == pytest.approx(1.5)
    assert run.group == "some_a100_runs"


def test_repeats_share_one_weight(tmp_path: Path) -> None:
    rows = [{**GPT, "config_key": key} for key in ("a", "a", "b")]
    assert [run.weight for run in read_runs([table(tmp_path, *rows)])] == [0.5, 0.5, 1.0]


def test_even_splits() -> None:
    assert even_split(24, 4) == (6, 6, 6, 6)
    assert even_split(126, 32) == (3, *[4] * 30, 3)
    assert even_split(31, 4) == (8, 8, 8, 7)
    assert even_split(25, 4) == (6, 7, 6, 6)


def test_images(tmp_path: Path) -> None:
    row = {
        "gpu": "A100-80GB",
        "gpus": "8",
        "model": "resnet50-v1.5",
        "image_size": "224",
        "batch_per_gpu": "256",
        "precision": "tf32",
        "images_per_s": "6000",
        "primary_metric": "images_per_s",
    }
    known, other = read_runs([table(tmp_path, row, {**row, "model": "ssd300"})])
    assert isinstance(known.work, ImageWork)
    assert known.work.units == 2048
    assert known.step_s == pytest.approx(2048 / 6000)
    assert not known.measures_steps
    assert other.reason == "unknown network"


def test_the_shipped_tables_are_read_whole() -> None:
    """Every line is predicted or says why."""
    folder = Path(__file__).parents[2] / "benchmarks" / "data"
    runs = read_runs([folder / "published_llm_runs.csv", folder / "published_vision_runs.csv"])
    assert len(runs) == 1156 + 219
    assert all((run.work is None) == bool(run.reason) for run in runs)
    assert sum(run.work is not None for run in runs) > 1000
