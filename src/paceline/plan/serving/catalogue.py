"""Catalogue: the costs of a step from a device's curves, where no engine was measured.

How it works: the passes of so many tokens are priced as the forward pass of a training step is
(`paceline.plan.price`), kernel by kernel, with the all-reduces of tensor parallelism and the host
that launches it all. Attention over blocks takes what reading their keys and values takes; those in
8 bits are also written and read as wide as products need them, as our operators do.

What it is not: measured. Our engine has run on CPUs alone; on a GPU it launches each kernel from
Python, which `launch_s` says, and attention of prompts is priced as one fused kernel.
"""

import numpy as np

from paceline.config.catalogue.own_stack import own_stack
from paceline.config.errors import InputError
from paceline.config.feasible import tensor_sizes
from paceline.config.hardware import Cluster
from paceline.config.layout import Layout
from paceline.config.model import Model
from paceline.config.serving import KeyForm
from paceline.config.stack import constant
from paceline.plan.points import BYTES, Points, Setting
from paceline.plan.price.step import NetworkParts
from paceline.plan.rates import attention_s, memory_s
from paceline.plan.serving.costs import Curve, StepCosts
from paceline.plan.serving.simulate import MOST_BLOCKS
from paceline.render.figures import bytes_text

# Of a device's memory, what an engine may fill: the rest is the context, libraries and holes.
# Assumed, as vLLM does (gpu_memory_utilization).
_USABLE = 0.9
_LARGE_BYTES = 1e9
_FP32 = _SCALE = 4


def catalogue_costs(
    model: Model,
    cluster: Cluster,
    tp: int,
    precision: str,
    block_size: int,
    max_tokens: int,
    keys: KeyForm = "as_weights",
) -> StepCosts:
    """What a step takes on `tp` devices of a cluster.

    Args:
        keys: the form of keys and values.

    Raises:
        InputError: how fast the device is at this precision is not known.
    """
    device, sizes = cluster.device, _sizes(max_tokens)
    passes = [_pass(model, cluster, tp, precision, size) for size in sizes]
    body, head, exchange, launch = (list(column) for column in zip(*passes, strict=True))
    stack = cluster.stack or own_stack(device.kind)
    byte_s = float(memory_s(device, _LARGE_BYTES)) / _LARGE_BYTES
    widened = 2 * key_bytes(model, precision) if keys == "int8" else 0.0
    key_s = byte_s * (key_bytes(model, precision, keys) + widened) / tp
    attention = stack.attention if model.has_fused_attention else "unfused"
    square = attention_s(
        device, precision, attention, 1, model.num_heads / tp, max_tokens, max_tokens,
        model.head_dim, 0.5,
    )  # fmt: skip
    step_s = constant(stack, "step_overhead_ms") / 1e3
    return StepCosts(
        Curve(sizes, body),
        Curve(sizes, head),
        block_s=key_s * block_size,
        key_s=key_s,
        pair_s=float(np.max(square)) * model.num_layers / (max_tokens**2 / 2),
        host_s=step_s,
        launch_s=0.0 if device.is_cpu else max(launch),
        exchange=Curve(sizes, exchange),
    )


def num_blocks(
    model: Model,
    cluster: Cluster,
    tp: int,
    precision: str,
    block_size: int,
    max_tokens: int,
    max_sequences: int,
    keys: KeyForm = "as_weights",
) -> int:
    """Blocks of keys and values that a device has room for.

    Args:
        keys: their form.

    Raises:
        InputError: its memory is not known, or doesn't hold the weights.
    """
    memory = cluster.device.memory_bytes
    if memory is None:
        raise InputError(
            f"the memory of {cluster.device.name} is not known: give cluster.device.memory_bytes."
        )
    weights = model.num_params * BYTES[precision] / tp
    logits = 2 * _FP32 * max_sequences * model.vocab_size / tp
    values = max_tokens * BYTES[precision] * (4 * model.hidden_size + 3 * model.ffn_size / tp)
    left = _USABLE * memory.value - weights - logits - values
    block = key_bytes(model, precision, keys) * block_size / tp
    if left < block:
        raise InputError(
            f"weights take {bytes_text(weights)} of the {bytes_text(memory.value)} of a device, "
            "and nothing is left for keys and values"
        )
    return min(int(left / block), MOST_BLOCKS)


def key_bytes(model: Model, precision: str, keys: KeyForm = "as_weights") -> float:
    """Of what all layers keep of a token; in 8 bits each row has a scale (`narrow_keys`)."""
    latent = model.latent
    rows, width = (
        (2 * model.num_kv_heads, model.head_dim)
        if latent is None
        else (1, latent.kv_rank + latent.rope_dim)
    )
    row = -(-width // 4) * 4 + _SCALE if keys == "int8" else width * BYTES[precision]
    return float(model.num_layers * rows * row)


def shares(model: Model, num_devices: int) -> list[int]:
    """Numbers of devices, powers of two up to so many, that can share the network."""
    sizes = tensor_sizes(model).values()
    powers = [2**n for n in range(num_devices.bit_length()) if 2**n <= num_devices]
    return [tp for tp in powers if all(size % tp == 0 for size in sizes)]


def _sizes(most: int) -> list[int]:
    return [*(2**n for n in range(most.bit_length()) if 2**n < most), most]


def _pass(
    model: Model, cluster: Cluster, tp: int, precision: str, rows: int
) -> tuple[float, float, float, float]:
    """Seconds of a pass of so many tokens: layers, head, exchanges, and the host's launches."""
    stack = cluster.stack or own_stack(cluster.device.kind)
    setting = Setting(model, cluster, rows, 1, stack)
    layout = Layout.parse(
        {"dp": 1, "tp": tp, "micro_batch": 1, "precision": precision, "param_dtype": precision}
    )
    network = NetworkParts.of(setting, Points.of([layout], setting))
    counts = [len(kind.layers) for kind in network.kinds]
    *blocks, embedding, head = (part.forward for part in network.parts)
    parts = [*zip(blocks, counts, strict=True), (embedding, 1)]

    def seconds(*terms: str) -> float:
        return sum(count * float(part.terms[t][0]) for part, count in parts for t in terms)

    launch = sum(count * float(part.host_s[0]) for part, count in parts) + float(head.host_s[0])
    body = seconds("matmul", "other_kernels") + (launch if cluster.device.is_cpu else 0.0)
    return body, float(head.terms["matmul"][0]), seconds("exposed_comm.tp"), launch
