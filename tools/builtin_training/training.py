"""The training loop: optimiser, schedule, loss, and which weights are kept."""

from __future__ import annotations

import logging
import math
import time
from typing import Any

import torch
from tokenizers import Tokenizer
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812

from builtin_training.config import TrainConfig
from builtin_training.corpus import Corpus
from builtin_training.measures import evaluate
from builtin_training.model import BuiltinModel, ModelShape
from builtin_training.rows import rows_of_epochs

logger = logging.getLogger(__name__)


def train_model(
    corpus: Corpus, tokenizer: Tokenizer, shape: ModelShape, config: TrainConfig, device: torch.device
) -> tuple[BuiltinModel, dict[str, Any]]:
    """Trains with AdamW and a cosine schedule; returns the model at its best dev loss, and the training record."""
    torch.manual_seed(config.seed)
    model = BuiltinModel(shape, config.dropout).to(device)
    matrices = [p for p in model.parameters() if p.dim() > 1]
    vectors = [p for p in model.parameters() if p.dim() == 1]
    optimizer = torch.optim.AdamW(
        [{"params": matrices, "weight_decay": config.weight_decay}, {"params": vectors, "weight_decay": 0.0}],
        lr=config.learning_rate,
        betas=(0.9, 0.95),
        fused=device.type == "cuda",
    )

    def loss_fn(rows: Tensor) -> tuple[Tensor, Tensor]:
        with torch.autocast(device.type, dtype=torch.bfloat16, enabled=device.type == "cuda"):
            logits, probs, chosen = model(rows[:, :-1])
        cross_entropy = F.cross_entropy(logits.float().flatten(0, 1), rows[:, 1:].flatten())
        balance = shape.num_experts * (probs.mean((1, 2)) * chosen.mean((1, 2))).sum(-1).mean()
        return cross_entropy, balance

    step_fn = torch.compile(loss_fn, dynamic=False) if config.compile_model else loss_fn
    started = time.monotonic()
    rows_by_epoch = rows_of_epochs(corpus, tokenizer, config)
    epoch_rows = next(rows_by_epoch)
    logger.info(
        "data ready after %.1f s, %d rows in the first epoch", time.monotonic() - started, len(epoch_rows)
    )
    num_steps = config.num_epochs * (len(epoch_rows) // config.batch_rows)
    eval_steps = {round(num_steps * (i + 1) / config.num_evals) for i in range(config.num_evals)}
    best_dev, best_state, history, cursor = math.inf, {}, [], 0
    started = time.monotonic()
    for step in range(1, num_steps + 1):
        if (cursor + 1) * config.batch_rows > len(epoch_rows):
            epoch_rows, cursor = next(rows_by_epoch), 0
        rows = epoch_rows[cursor * config.batch_rows : (cursor + 1) * config.batch_rows].to(device)
        cursor += 1
        warmup = max(1, num_steps // 30)
        cosine = 0.5 * (1 + math.cos(math.pi * (step - warmup) / (num_steps - warmup)))
        scale = step / warmup if step < warmup else cosine
        for group in optimizer.param_groups:
            group["lr"] = config.learning_rate * max(scale, 0.01)
        cross_entropy, balance = step_fn(rows)
        torch.autograd.backward(cross_entropy + config.aux_loss_coef * balance)
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        if step in eval_steps:
            dev = evaluate(model, tokenizer, corpus.dev, stride=512)["bits_per_character"]
            seconds = time.monotonic() - started
            history.append(
                {"step": step, "train_loss": cross_entropy.item(), "dev_bpc": dev, "seconds": seconds}
            )
            logger.info(
                "step %d of %d, train loss %.3f, balance %.2f, dev %.4f bits per character, %.0f s",
                *(step, num_steps, cross_entropy.item(), balance.item(), dev, seconds),
            )
            if dev < best_dev:
                best_dev, best_state = dev, {k: v.detach().clone() for k, v in model.state_dict().items()}
    model.load_state_dict(best_state)
    seconds = time.monotonic() - started
    return model, {
        "num_steps": num_steps,
        "train_seconds": seconds,
        "best_dev_bpc": best_dev,
        "history": history,
    }
