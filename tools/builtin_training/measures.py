"""How good the model is: bits per character, expert load, samples."""

from __future__ import annotations

import math
from typing import Any

import torch
from tokenizers import Tokenizer
from torch.nn import functional as F  # noqa: N812

from builtin_training.model import BuiltinModel
from builtin_training.tokenizer import END_OF_TEXT, IM_END, special_id


@torch.no_grad()
def evaluate(
    model: BuiltinModel, tokenizer: Tokenizer, scenes: list[str], stride: int = 256
) -> dict[str, Any]:
    """Measures bits per character and expert load on whole scenes, in float32 arithmetic.

    Each scene is scored alone: ``<|endoftext|>``, its tokens, ``<|endoftext|>``. A window of 1024 tokens slides by
    ``stride``; every token is scored once, with all earlier tokens of the scene as context, or with at least
    ``1024 - stride`` of them where the scene is longer than the window. The cost of the closing ``<|endoftext|>``
    counts; only characters of text are counted.
    """
    was_training, device, window = (
        model.training,
        model.embed.weight.device,
        model.shape.max_position_embeddings,
    )
    model.eval()
    end_id = special_id(tokenizer, END_OF_TEXT)
    windows: list[tuple[list[int], int]] = []
    for encoding in tokenizer.encode_batch(scenes):
        ids = [end_id, *encoding.ids, end_id]
        windows.append((ids[: window + 1], 0))
        for begin in range(stride, len(ids) - window - 1 + stride, stride):
            # The last window is moved back to end with the scene; its first targets were scored before.
            moved = min(begin, len(ids) - window - 1)
            windows.append((ids[moved : moved + window + 1], window - stride + begin - moved))
    windows.sort(key=lambda item: len(item[0]))
    total_nats, num_tokens = 0.0, 0
    load = torch.zeros(model.shape.num_hidden_layers, model.shape.num_experts, dtype=torch.float64)
    batch_rows = 32 if device.type == "cuda" else 4
    for i in range(0, len(windows), batch_rows):
        batch = windows[i : i + batch_rows]
        width = max(len(ids) for ids, _ in batch)
        rows = torch.tensor([ids + [end_id] * (width - len(ids)) for ids, _ in batch], device=device)
        position = torch.arange(width - 1, device=device)
        first = torch.tensor([skip for _, skip in batch], device=device)[:, None]
        last = torch.tensor([len(ids) - 1 for ids, _ in batch], device=device)[:, None]
        scored = ((position >= first) & (position < last)).double()
        logits, _, chosen = model(rows[:, :-1])
        nats = F.cross_entropy(logits.float().transpose(1, 2), rows[:, 1:], reduction="none").double()
        total_nats += float((nats * scored).sum())
        num_tokens += int(scored.sum())
        load += (chosen.double() * scored[None, :, :, None]).sum((1, 2)).cpu()
    model.train(was_training)
    num_expected = sum(len(encoding) + 1 for encoding in tokenizer.encode_batch(scenes))
    assert num_tokens == num_expected, (
        f"scored {num_tokens} tokens of {num_expected}: windows must cover each once"
    )
    num_characters = sum(map(len, scenes))
    return {
        "bits_per_character": total_nats / math.log(2) / num_characters,
        "bits_per_token": total_nats / math.log(2) / num_tokens,
        "num_characters": num_characters,
        "num_tokens": num_tokens,
        "max_over_mean_load": (load.max(1).values / load.mean(1)).tolist(),
        "min_over_mean_load": (load.min(1).values / load.mean(1)).tolist(),
    }


@torch.no_grad()
def sample_text(
    model: BuiltinModel, tokenizer: Tokenizer, prompt: str, max_tokens: int, temperature: float, seed: int
) -> str:
    """Samples a continuation of ``prompt`` on the CPU; stops at ``<|endoftext|>`` or ``<|im_end|>``."""
    generator = torch.Generator().manual_seed(seed)
    ids: list[int] = tokenizer.encode(prompt).ids
    num_prompt = len(ids)
    stop_ids = {special_id(tokenizer, END_OF_TEXT), special_id(tokenizer, IM_END)}
    for _ in range(max_tokens):
        logits = model(torch.tensor([ids[-model.shape.max_position_embeddings :]]))[0][0, -1]
        token = int(torch.multinomial((logits / temperature).softmax(-1), 1, generator=generator))
        ids.append(token)
        if token in stop_ids:
            break
    return str(tokenizer.decode(ids[num_prompt:], skip_special_tokens=False))
