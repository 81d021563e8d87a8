"""Settings of a training run."""

from __future__ import annotations

from dataclasses import dataclass


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
