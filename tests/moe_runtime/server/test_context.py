"""What every endpoint asks first."""

from __future__ import annotations

import pytest

from moe_runtime.server.context import Context
from moe_runtime.server.errors import ApiError, unavailable
from moe_runtime.server.metrics import Metrics


class StubClient:
    """A client in a given state."""

    def __init__(self, error):
        self.error = error

    def unavailable_error(self):
        return self.error


def context(config, error=None):
    metrics = Metrics(config, {})
    return Context(
        config=config, client=StubClient(error), tokenizer=None, metrics=metrics, sampling_defaults={}
    )


def test_an_unready_server_is_a_503(make_config):
    context(make_config()).require_ready()
    with pytest.raises(ApiError, match="later"):
        context(make_config(), unavailable("later", code="not_ready")).require_ready()


def test_an_unknown_model_is_a_404(make_config):
    context(make_config()).require_model("m")
    context(make_config()).require_model(None)
    with pytest.raises(ApiError) as raised:
        context(make_config()).require_model("gpt-4")
    assert (raised.value.status, raised.value.code, raised.value.param) == (404, "model_not_found", "model")


def test_fallback_seeds_repeat_with_the_server_seed_and_differ_from_each_other(make_config):
    first, second = context(make_config(seed=5)), context(make_config(seed=5))
    seeds = [first.fallback_seed() for _ in range(4)]
    assert seeds == [second.fallback_seed() for _ in range(4)]
    assert len(set(seeds)) == 4
    assert all(0 <= seed < 2**63 for seed in seeds)
    assert context(make_config(seed=6)).fallback_seed() != seeds[0]
    assert context(make_config()).fallback_seed() is None
