"""Placements of experts for tests: in a given order, or random with copies."""

from __future__ import annotations

import contextlib
import itertools
import random
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import pytest

from moe_runtime.engine import model_loader
from moe_runtime.eplb.placement import ExpertPlacement, ModelPlacement, even_slots
from moe_runtime.models.model_config import ModelConfig

__all__ = ["any_placement", "contiguous_placement", "in_order", "ordered_placement", "placed"]


def contiguous_placement(
    num_logical_experts: int, ep_size: int, order: Sequence[int] | None = None
) -> ExpertPlacement:
    """One layer, one copy of each expert, consecutive ids (or those of ``order``) on each rank.

    The first ``num_logical_experts mod ep_size`` ranks hold one expert more than the others: 5 experts on 3 ranks are
    (0, 1), (2, 3), (4).
    """
    ids = np.arange(num_logical_experts) if order is None else np.asarray(order)
    return ExpertPlacement(
        physical_to_logical_map=ids.astype(np.int64),
        first_expert=(0, *itertools.accumulate(even_slots(num_logical_experts, ep_size))),
        num_logical_experts=num_logical_experts,
    )


def ordered_placement(
    num_layers: int, num_experts: int, ep_size: int, order: Sequence[int] | None = None
) -> ModelPlacement:
    """One copy of each expert, in the same order in every layer."""
    ids = list(range(num_experts)) if order is None else list(order)
    return ModelPlacement(
        physical_to_logical_map=np.array([ids] * num_layers),
        first_expert=(0, *itertools.accumulate(even_slots(num_experts, ep_size))),
        num_logical_experts=num_experts,
    )


def any_placement(
    num_layers: int, num_experts: int, ep_size: int, num_redundant_experts: int, seed: int
) -> ModelPlacement:
    """Copies of any experts anywhere, another order in each layer; also two copies on one rank."""
    generator = random.Random(seed)
    layers = []
    for _ in range(num_layers):
        ids = list(range(num_experts))
        ids += [generator.randrange(num_experts) for _ in range(num_redundant_experts)]
        generator.shuffle(ids)
        layers.append(ids)
    slots = even_slots(num_experts + num_redundant_experts, ep_size)
    return ModelPlacement(
        physical_to_logical_map=np.array(layers),
        first_expert=(0, *itertools.accumulate(slots)),
        num_logical_experts=num_experts,
    )


@contextlib.contextmanager
def placed(make: Any) -> Iterator[None]:
    """Models planned meanwhile have the placement ``make(num_layers, num_experts, ep_size)``."""

    def initial(config: ModelConfig, ep_size: int, *_: Any) -> ModelPlacement:
        found: ModelPlacement = make(max(1, len(config.moe_layer_ids)), config.num_experts, ep_size)
        return found

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(model_loader, "initial_placement", initial)
        yield


def in_order(order: Sequence[int] | None) -> contextlib.AbstractContextManager[None]:
    """Models planned meanwhile have their experts in this order."""
    return placed(lambda *sizes: ordered_placement(*sizes, order))
