"""What a kernel does, by its name: one table of patterns, read from the top.

A name is judged by the function's own name. What stands in its template arguments and parameters
doesn't count: a type of CUTLASS in a parameter makes no product. Exceptions are the functions that
only wrap what their first arguments name: `cutlass::device_kernel`, `ck_tile::kentry`, PyTorch's
elementwise kernels. The patterns are of libraries, as they spell their kernels: PyTorch and
Inductor, cuBLAS, cuDNN, CUTLASS, Triton, Transformer Engine and Megatron, apex, xformers, FBGEMM,
vLLM, SGLang, FlashInfer, TensorRT-LLM, DeepSeek's, Liger, rocBLAS, hipBLASLt, MIOpen, CK, AITER.

Not here: what surrounds a kernel (`observe.kineto.cuda` lets the operator have its say).
"""

import re
from functools import lru_cache

EXPOSED_COMM = "exposed_comm"
OTHER = "other_kernels"
OTHER_KINDS = ("norm", "elementwise", "copy", "embedding", "routing")

_NAMELESS = re.compile(r"\(anonymous namespace\)::|\{anonymous\}::|\[clone [^\]]*\]|\.kd$")
# Functions that run what their arguments name.
_RUNS_ARGUMENTS = re.compile(r"kentry$|(^|::)(device_kernel|kernel\d?|wrapper)$")
_MANGLED = re.compile(r"_znk?|_z(?=\d)")
_SAMPLES = re.compile(r"sampl|gumbel|argmax|multinomial|penalt|top_?k?_?top_?p|top_?p_|exponential")
_LENGTH = re.compile(r"\d+")
_FUNCTORS = re.compile(r"elementwise_kernel|unrolled_")
_COPIES = re.compile(r"copy_kernel|fillfunctor")

# In order: the first that fits counts. Names are in lower case.
_TABLE = tuple(
    (term, re.compile(pattern))
    for term, pattern in (
        # Inductor names its kernels after the operators around them, whose own kernels they aren't:
        # what stands before "fused" tells.
        ("attention", r"^triton_(tem_)?(fused_)?\w*(flex_attention|flex_decoding)"),
        ("matmul", r"^triton_(tem|mm|bmm)"),
        (f"{OTHER}.norm", r"^triton_(red|per|spl)_"),
        (f"{OTHER}.elementwise", r"^triton_(poi|for|unk)"),
        (f"{OTHER}.elementwise", r"^triton__?\d"),
        # NCCL and its like of other vendors; NVSHMEM and DeepEP; reductions over shared memory by
        # vLLM, SGLang, TensorRT-LLM, FlashInfer, AITER, Transformer Engine ("userbuffers") and
        # PyTorch's symmetric memory; PyTorch's and pplx' exchange of experts.
        (
            EXPOSED_COMM,
            r"(n|r|h|x|mu|ms|one)ccl(?!udacom)|(nv|roc)shmem|(deep_ep|::ep)::(internode|intranode)|"
            r"cross_device_reduce|all_?reduce|all_?gather|reduce_?scatter|all_?to_?all|"
            r"(one|two)_?shot|multimem|userbuffers|moe_a2a|ring_exchange|quick_?reduce|"
            r"low_latency_(dispatch|combine)|a2a_(dispatch|combine)|ep_(dispatch|combine)|"
            r"epdispatch|epcombine|barrier_all|lamport|^(dispatch|combine)_(send|recv)|p2p_(send|recv)",
        ),
        # Writing keys and values into a cache is no attention.
        (
            f"{OTHER}.copy",
            r"reshape_and_cache|append_?paged|(store|set|write)_\w*kv|concat_and_cache",
        ),
        (f"{OTHER}.elementwise", r"rotary|(^|_|:)rope|_rope|applyrope|qkapply|llamarotary"),
        (
            "attention",
            r"(^|[^a-z])flash(?!infer)|flashmla|fmha|sdpa|attention|attn_(?!mask)|_attn|(^|[^a-z])mha|"
            r"bwd_kernel_d[kq]|^_(fwd|bwd)_kernel|fwd_(grouped_)?kernel_stage|batch(prefill|decode)|"
            r"single(prefill|decode)|merge_?state|(^|[^a-z])mla(_|$|[^a-z])|xqa|^bwd_preprocess",
        ),
        # FBGEMM's lookups carry their optimizer in the name.
        (f"{OTHER}.elementwise", r"fbgemm_gpu::_\w*(fp8|8bit|quantize|float)"),
        (
            f"{OTHER}.embedding",
            r"embedding|embs_|bounds_check_ind|linearize_|permute_[12]d|jagged|bucketize|lxu_cache|"
            r"lru_cache|rowwise_adagrad|fbgemm_gpu::",
        ),
        (
            "optimizer",
            r"multi_tensor_|fused_?adam|adamw|adam_|_adam|fused_?sgd|lamb_?stage|fused_?lamb|"
            r"koptimizer|adagrad|lion_|muon|newton_schulz|l2normfunctor",
        ),
        # Tokens to experts and back, and what picks: sorting, top-k, sampling.
        (
            f"{OTHER}.routing",
            r"routing|moe::dev::(finalize|permute|convert)|moe_(align|sum|permute|unpermute|fused_gate|sort|gather|scatter)|"
            r"moesorting|topk|top_?p|top_k|gating|_finalize_matmul|expand_?input|expert_(count|offset|map)|"
            r"(un)?permute_(kernel|tok|rows)|row_id_map|sort|bitonic|histogram|bitmatrix|"
            r"(?<!chunk_)(?<!selective_)scan|count_expert|fused_mapping|"
            r"sampl|argmax|multinomial|nonzero|unique|compact|deviceselect|penalt|gumbel|"
            r"(^|[^a-z])searchsorted|expand_to_fused|sum_\w*rows|rejection|get_dispatch_layout",
        ),
        (
            "matmul",
            r"(?<!fb)gemm|gemv|gemv?t|(^|[^a-z])matmul|bmm_|(^|_)bmm|cutlass|xmma|nvjet|scudnn|cublas|"
            r"splitk|winograd|convolve|convolution|conv[123]d|conv_depthwise|_conv|wgrad|dgrad|fprop|"
            r"^_?mm_kernel|scaled_mm|grouped_mm|cijk_|tensile|asmconv|miopen\w*conv|igemm|gridwise_?(conv|gemm)|"
            r"fused_moe|moe_(wna16|mmk)|marlin|machete|awq|gptq|exllama|wvsplit|llmm1|kn_linear|"
            r"cask_cudnn|epilogue::impl|fft[12]d_|s?884|s16816|hmma|mfma|wgmma|cudnn::cnn|dot_kernel|trsm|syrk",
        ),
        (
            f"{OTHER}.norm",
            r"norm|(^|[^a-z])bn_|softmax|reduce|(^|_|:)ln_|cross_?entropy|nll_|loss|pool|welford|"
            r"logsumexp|gammabeta|moments|cucompute|cunn_|(^|_)mean|(^|_)var_|batchnorm|cub::devicereduce|segment",
        ),
        (
            f"{OTHER}.copy",
            r"copy|catarray|concat|memcpy|memset|fill|transpose|nchw2?t?o?nhwc|nhwc2?t?o?nchw|permute|"
            r"index|indices|tensortransform|gather|scatter|(^|_)pad|arange|im2col|col2im|roll_|flip|repeat|triu|tril|"
            r"subtensorop|swap|shuffle|pack_|unpack",
        ),
        (
            f"{OTHER}.elementwise",
            r"elementwise|vectorized|unrolled|[sg]elu|silu|relu|swiglu|geglu|sigmoid|tanh|act_and|"
            r"act_?fn|activation|dropout|bias|cast|quant|scale|scal_|add_|_add|mul_|_mul|pointwise|where|"
            r"mask|lerp|clamp|distribution|random|philox|upsample|interp|convert|op_?tensor|"
            r"amp_|isfinite|nan|exp_|pow_|to_fp8|fp8|tensorop",
        ),
    )
)


@lru_cache(maxsize=8192)
def kernel_term(name: str) -> str:
    """Return the term of a device kernel, judged by its name alone."""
    lowered = _NAMELESS.sub("", name).lower()
    own = _own_name(lowered)
    if _RUNS_ARGUMENTS.search(own):
        # Types of products stand in attention as well, and types of anything in products.
        order = sorted(_TABLE, key=lambda row: ("attention", "matmul", row[0]).index(row[0]))
        return next((term for term, pattern in order if pattern.search(lowered)), OTHER)
    if _FUNCTORS.search(own) and _COPIES.search(lowered):
        return f"{OTHER}.copy"
    return next((term for term, pattern in _TABLE if pattern.search(own)), OTHER)


def is_communication(name: str) -> bool:
    """Say whether a kernel communicates, as `kernel_term` does, quickly for names that don't."""
    pattern = next(pattern for term, pattern in _TABLE if term == EXPOSED_COMM)
    return pattern.search(name.lower()) is not None and kernel_term(name) == EXPOSED_COMM


def samples(name: str) -> bool:
    """Say whether a kernel picks tokens, as only a sampler does."""
    return _SAMPLES.search(_own_name(_NAMELESS.sub("", name).lower())) is not None


def _own_name(name: str) -> str:
    """Return a function's qualified name without template arguments, parameters and its type."""
    if _MANGLED.match(name):
        return _unmangled(name)
    kept, open_brackets = [], []
    for letter in name:
        if letter in "<(":
            open_brackets.append(letter)
        elif letter == ">" and open_brackets[-1:] == ["<"]:
            open_brackets.pop()
        elif letter == ")" and "(" in open_brackets:
            while open_brackets.pop() != "(":
                pass
        elif not open_brackets:
            kept.append(letter)
    words = "".join(kept).split()
    return words[-1] if words else name


def _unmangled(name: str) -> str:
    """Return the qualified name that a mangled one begins with: each word behind its length."""
    mangled = _MANGLED.match(name)
    at, parts = mangled.end() if mangled else 0, []
    while length := _LENGTH.match(name, at):
        at = length.end() + int(length[0][:4])
        parts.append(name[length.end() : at])
    named = [part for part in parts if not part.startswith("_global_")]
    return "::".join(named) or name
