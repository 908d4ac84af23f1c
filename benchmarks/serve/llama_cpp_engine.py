"""llama.cpp, by its own calls: requests join a batch that runs, as its server has it."""

import json
import os
import sys
import time
from collections import deque
from dataclasses import dataclass
from pathlib import Path

import gguf
import llama_cpp
import numpy as np
from safetensors.numpy import load_file

from benchmarks.serve.workload import Request, Stopwatch, answer, asked

_SEQUENCES, _TOKENS = 64, 512
"""As ours: texts that are made at a time, and tokens of a pass."""
_NAMES = {
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}


def main() -> None:
    """Do what is asked; or convert a folder into a file of GGUF."""
    if sys.argv[1] == "convert":
        for precision in ("fp32", "bf16"):
            _convert(Path(sys.argv[2]), f"{sys.argv[3]}-{precision}.gguf", precision)
        return
    task = asked()
    engine = _Engine(f"{Path(task.folder).with_name('llama.cpp')}-{task.precision}.gguf")

    def run(requests: tuple[Request, ...]) -> Stopwatch:
        watch, left = Stopwatch(requests), list(enumerate(requests))
        while left or not engine.is_idle:
            while left and left[0][1].after_s <= watch.now():
                engine.waiting.append(left.pop(0))
            if engine.is_idle:
                time.sleep(0.001)
                continue
            engine.step(watch)
        return watch

    answer(task, run, "llama-cpp-python")


@dataclass
class _Slot:
    """A text that is made."""

    number: int
    left: list[int]
    """Its tokens that have to be computed."""
    place: int = 0
    """Of the first of these."""


class _Engine:
    def __init__(self, file: str) -> None:
        model_params = llama_cpp.llama_model_default_params()
        model = llama_cpp.llama_model_load_from_file(file.encode(), model_params)
        params = llama_cpp.llama_context_default_params()
        params.n_ctx = _SEQUENCES * 1024
        params.n_batch = params.n_ubatch = _TOKENS
        params.n_seq_max = _SEQUENCES
        params.kv_unified = True
        params.n_threads = params.n_threads_batch = len(os.sched_getaffinity(0))
        self._context = llama_cpp.llama_init_from_model(model, params)
        vocab = llama_cpp.llama_model_get_vocab(model)
        self._vocab_size = llama_cpp.llama_vocab_n_tokens(vocab)
        self._batch = llama_cpp.llama_batch_init(_TOKENS, 0, 1)
        self._free = deque(range(_SEQUENCES))
        self._slots: dict[int, _Slot] = {}
        self.waiting: deque[tuple[int, Request]] = deque()

    @property
    def is_idle(self) -> bool:
        return not self.waiting and not self._slots

    def step(self, watch: Stopwatch) -> None:
        """A pass: the next token of each text, then prompts as far as there is room."""
        while self.waiting and self._free:
            number, request = self.waiting.popleft()
            self._slots[self._free.popleft()] = _Slot(number, [*request.prompt])
        batch, wanted = self._batch, {}
        batch.n_tokens = 0
        for name, slot in sorted(self._slots.items(), key=lambda each: len(each[1].left) > 1):
            count = min(len(slot.left), _TOKENS - batch.n_tokens)
            for token in slot.left[:count]:
                row = batch.n_tokens
                batch.token[row], batch.pos[row] = token, slot.place
                batch.n_seq_id[row], batch.seq_id[row][0] = 1, name
                batch.logits[row] = 0
                batch.n_tokens, slot.place = row + 1, slot.place + 1
            del slot.left[:count]
            if not slot.left:
                wanted[name] = batch.n_tokens - 1
                batch.logits[batch.n_tokens - 1] = 1
        assert llama_cpp.llama_decode(self._context, batch) == 0
        for name, row in wanted.items():
            logits = llama_cpp.llama_get_logits_ith(self._context, row)
            token = int(np.ctypeslib.as_array(logits, (self._vocab_size,)).argmax())
            self._take(name, token, watch)

    def _take(self, name: int, token: int, watch: Stopwatch) -> None:
        slot = self._slots[name]
        watch.came(slot.number, [token])
        slot.left.append(token)
        if not watch.lacks(slot.number):
            memory = llama_cpp.llama_get_memory(self._context)
            llama_cpp.llama_memory_seq_rm(memory, name, -1, -1)
            del self._slots[name]
            self._free.append(name)


def _convert(folder: Path, file: str, precision: str) -> None:
    """Write a network in Llama's shape as GGUF: matrices in a precision, norms in fp32."""
    config = json.loads((folder / "config.json").read_text())
    heads = {
        "self_attn.q_proj": config["num_attention_heads"],
        "self_attn.k_proj": config["num_key_value_heads"],
    }
    writer = gguf.GGUFWriter(file, "llama")
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_rope_dimension_count(config["head_dim"])
    writer.add_rope_freq_base(config["rope_theta"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_vocab_size(config["vocab_size"])
    writer.add_tokenizer_model("none")
    kind = gguf.GGMLQuantizationType
    for name, tensor in load_file(folder / "model.safetensors").items():
        place = name.removeprefix("model.").removesuffix(".weight")
        if place.startswith("layers."):
            _, layer, part = place.split(".", 2)
            place = f"blk.{layer}.{_NAMES[part]}"
            if part in heads:
                tensor = _interleaved(tensor, heads[part])
        else:
            place = {"embed_tokens": "token_embd", "norm": "output_norm"}[place]
        form = kind.BF16 if precision == "bf16" and tensor.ndim == 2 else kind.F32
        writer.add_tensor(f"{place}.weight", gguf.quantize(tensor, form), raw_dtype=form)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _interleaved(weight: np.ndarray, heads: int) -> np.ndarray:
    """Rows in llama.cpp's order: the two halves that rotate together stand beside each other."""
    rows, width = weight.shape
    parts = weight.reshape(heads, 2, rows // heads // 2, width)
    return np.ascontiguousarray(parts.swapaxes(1, 2)).reshape(rows, width)


if __name__ == "__main__":
    main()
