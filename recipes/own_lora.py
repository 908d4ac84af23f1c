"""Train an adapter: LoRA of Hugging Face's peft on a model of transformers.

    python recipes/own_lora.py

The base stays as it is; two small matrices beside each attention projection learn
(https://arxiv.org/abs/2106.09685). The model here is a tiny Llama with random weights, so nothing
is downloaded: put `AutoModelForCausalLM.from_pretrained(folder)` in its place. The task is one that
even a random base can be bent to: answer a number with the same number.

Prompts are no part of the loss, and answers have different lengths, so micro-batches count by their
answers' tokens: the loss says how many these are.
"""

import sys
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence

import paceline

try:
    from peft import LoraConfig, get_peft_model
    from transformers import LlamaConfig, LlamaForCausalLM
except ImportError:
    sys.exit("This recipe trains an adapter of peft: pip install peft transformers")

IGNORED, PADDING, END, ASK = -100, 10, 11, 12  # the digits are tokens 0 to 9


def base_model() -> nn.Module:
    """A tiny Llama with random weights."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=16,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        pad_token_id=PADDING,
        eos_token_id=END,
    )
    return LlamaForCausalLM(config)


def examples(count: int, seed: int) -> list[dict[str, Tensor]]:
    """Numbers of one to four digits, asked for and answered; tokens and labels of (length,)."""
    chance = torch.Generator().manual_seed(seed)
    made = []
    for _ in range(count):
        length = int(torch.randint(1, 5, (), generator=chance))
        digit = int(torch.randint(10, (), generator=chance))
        prompt, answer = [digit] * length + [ASK], [digit] * length + [END]
        labels = [IGNORED] * len(prompt) + answer
        made.append({"tokens": torch.tensor(prompt + answer), "labels": torch.tensor(labels)})
    return made


def collate(samples: list[dict[str, Tensor]]) -> dict[str, Tensor]:
    """Pad samples to the longest of them: what a model of transformers takes, (batch, length)."""
    tokens = pad_sequence([s["tokens"] for s in samples], batch_first=True, padding_value=PADDING)
    labels = pad_sequence([s["labels"] for s in samples], batch_first=True, padding_value=IGNORED)
    return {"input_ids": tokens, "attention_mask": tokens != PADDING, "labels": labels}


def loss(model: nn.Module, batch: dict[str, Tensor]) -> tuple[Any, dict[str, Tensor]]:
    """The model's own mean loss, over as many tokens as are labelled, and how many it got right."""
    output = model(**batch)
    labels = batch["labels"][:, 1:]  # the model predicts the next token
    counts = labels != IGNORED
    right = (output.logits[:, :-1].argmax(dim=-1) == labels)[counts].float().mean()
    return output, {"weight": counts.sum(), "accuracy": right}


def main() -> None:
    """The essential part."""
    adapter = LoraConfig(r=16, lora_alpha=32, target_modules="all-linear", task_type="CAUSAL_LM")
    model = get_peft_model(base_model(), adapter)
    job = {
        "name": "lora",
        "optim": {"lr": 1e-2, "weight_decay": 0.0, "warmup_steps": 10},
        "train": {"steps": 150, "global_batch": 32, "eval_every": 50},
        "checkpoint": {"every": 50, "best": "eval_loss"},
    }
    run = paceline.train(
        job, model, loss, examples(2000, seed=1), examples(100, seed=2), collate=collate
    )
    model.save_pretrained(run.path / "adapter")  # the adapter alone
    print(f"held-out accuracy {run.metrics()[-1]['eval_figures']['accuracy']:.1%}")


if __name__ == "__main__":
    main()
