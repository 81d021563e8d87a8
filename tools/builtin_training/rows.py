"""Rows of token ids for training: scenes, split at random anew in each epoch, and conversations."""

from __future__ import annotations

import itertools
import json
import random
from collections.abc import Iterator

import numpy as np
import torch
from tokenizers import Tokenizer
from torch import Tensor

from builtin_training.config import TrainConfig
from builtin_training.conversations import ChatSampler
from builtin_training.corpus import Corpus
from builtin_training.tokenizer import END_OF_TEXT, special_id


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
        flat.append(special_id(tokenizer, END_OF_TEXT))
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


def rows_of_epochs(corpus: Corpus, tokenizer: Tokenizer, config: TrainConfig) -> Iterator[Tensor]:
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
