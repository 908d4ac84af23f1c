"""Weights as ONNX: ONNX Runtime finds the same logits, in parts, and for several texts at once."""

import numpy as np
import pytest
import torch

from paceline.config.errors import InputError
from paceline.config.model import Experts, Model
from paceline.models.cached_step import check_graph
from paceline.models.decoder import Decoder

_SHAPE = {
    "vocab_size": 320,
    "hidden_size": 64,
    "ffn_size": 96,
    "num_layers": 2,
    "num_heads": 4,
    "num_kv_heads": 2,
    "max_seq_len": 64,
}
MODELS = {
    "llama": Model(**_SHAPE, tie_embeddings=True),
    "windows": Model(**_SHAPE, qk_norm=True, sliding_window=5, full_layers=(1,)),
}
CLOSE = {None: 1e-5, 8: 3e-2, 4: 0.3}
"""Of logits of random weights, as a part of them."""


@pytest.fixture(scope="module")
def onnxruntime():
    pytest.importorskip("onnxscript", reason="needs onnxscript, by which torch writes ONNX")
    return pytest.importorskip("onnxruntime", reason="needs onnxruntime, which reads it")


def in_two_parts(onnxruntime, file, model, tokens, cut):
    session = onnxruntime.InferenceSession(str(file))
    shape = (model.num_layers, len(tokens), model.num_kv_heads, 0, model.head_dim)
    kept, logits = [np.zeros(shape, np.float32)] * 2, []
    for part in (tokens[:, :cut], tokens[:, cut:]):
        given = dict(zip(("tokens", "keys", "values"), (part.numpy(), *kept), strict=True))
        found, *kept = session.run(None, given)
        logits.append(torch.from_numpy(found))
    return torch.cat(logits, 1)


@pytest.mark.parametrize(
    ("name", "bits"), [("llama", None), ("llama", 8), ("llama", 4), ("windows", None)]
)
def test_onnx_runtime_finds_the_same_logits(tmp_path, onnxruntime, name, bits):
    from paceline.models.onnx_file import write_onnx

    decoder = Decoder(MODELS[name])
    decoder.init_weights(torch.Generator().manual_seed(0))
    write_onnx(tmp_path / "x.onnx", MODELS[name], decoder.state_dict(), bits)
    tokens = torch.randint(320, (3, 21), generator=torch.Generator().manual_seed(1))
    found = in_two_parts(onnxruntime, tmp_path / "x.onnx", MODELS[name], tokens, 13)
    with torch.no_grad():
        wanted = decoder(tokens)
    assert (found - wanted).norm() < CLOSE[bits] * wanted.norm()
    if bits is not None:
        whole = sum(each.nbytes for each in decoder.state_dict().values())
        # Bits, a scale in fp32 for each 32 weights, and a tied matrix that is there twice.
        part = (bits + 1 + 2) / 32 * 2
        assert (tmp_path / "x.onnx").stat().st_size < whole * part + 60_000


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"experts": Experts(num_experts=4, experts_per_token=2, ffn_size=32)}, "its own experts"),
        ({"score_cap": 20.0}, "its own score_cap"),
    ],
)
def test_other_networks_are_refused(changes, said):
    with pytest.raises(InputError, match=said):
        check_graph(MODELS["llama"].replace(**changes), "onnx")
