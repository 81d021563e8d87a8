"""What ``/metrics`` shows, in Prometheus' text format: counters of one front end, and the ranks' latest reports.

A *sequence* is one choice of one prompt. Tokens count as ``usage`` counts them: a prompt once however many choices it
has, and no token past the end of its choice. Times run from the hand-over to a rank to the arrival of tokens here, so
neither tokenisation nor a client that reads slowly is in them.

Labels are few and fixed: ``rank``, ``position``, ``finished_reason``, ``reason``, ``kind`` and, in the info metric,
settings of the deployment. Nothing that a client sends becomes a label. ``process_...`` is the front end's own process.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator, Mapping, Sequence

from prometheus_client import CollectorRegistry, Counter, Histogram, ProcessCollector, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from moe_runtime.engine.messages import RankStats
from moe_runtime.engine.structured_outputs import KINDS
from moe_runtime.server.admission import REASONS as REFUSAL_REASONS
from moe_runtime.server.client import RankState
from moe_runtime.server.config import ServerConfig
from moe_runtime.server.expert_load import LoadTally
from moe_runtime.server.load_metrics import load_families
from moe_runtime.server.rearrangement_metrics import rearrangement_families
from moe_runtime.server.speculation_metrics import speculation_families

__all__ = ["CONTENT_TYPE", "CUT_REASONS", "FINISH_REASONS", "PREFIX", "Metrics", "SequenceMetrics"]

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
PREFIX = "moe_runtime"
FINISH_REASONS = ("stop", "length", "abort")
CUT_REASONS = ("request_timeout", "slow_reader", "no_token_left")

_FIRST_TOKEN_BUCKETS_S = (0.005, 0.01, 0.02, 0.04, 0.08, 0.16, 0.32, 0.64, 1.25, 2.5, 5.0, 10.0, 20.0, 40.0)
_TOKEN_BUCKETS_S = (0.001, 0.0025, 0.005, 0.01, 0.015, 0.02, 0.03, 0.05, 0.075, 0.1, 0.2, 0.4, 0.8, 1.6, 3.2)
_REQUEST_BUCKETS_S = (0.05, 0.1, 0.25, 0.5, 1.0, 2.0, 4.0, 8.0, 16.0, 32.0, 64.0, 128.0, 256.0, 512.0)
_COMPILE_BUCKETS_S = (0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 4.0)
_CONFIG_LABELS = ("dtype", "device", "invariance")


class Metrics:
    """The metrics of one front end, in a registry of its own. Belongs to one event loop.

    Args:
        config: The front end's configuration.
        ranks: The client's view of the ranks; read at each exposition.
        load: Its tally of expert load, if there are experts.
    """

    def __init__(
        self, config: ServerConfig, ranks: Mapping[int, RankState], load: LoadTally | None = None
    ) -> None:
        self._registry = CollectorRegistry()
        self._registry.register(_StateCollector(config, ranks, load))
        self._prompt_tokens = self._counter(
            "prompt_tokens", "Prompt tokens, counted when their first output arrives"
        )
        self._generation_tokens = self._counter("generation_tokens", "Output tokens")
        self._finished = Counter(
            f"{PREFIX}_request_success",
            "Sequences that ended, by finish reason; abort: the client left, its time was over, or the server ended",
            ["finished_reason"],
            registry=self._registry,
        )
        for reason in FINISH_REASONS:
            self._finished.labels(reason)
        self._slow_steps = self._counter("slow_steps", "Steps that took longer than slow_step_s")
        self._refused = self._by_reason(
            "requests_refused", "Calls refused with 429, by the bound that was met", REFUSAL_REASONS
        )
        self._cut = self._by_reason(
            "requests_cut_short",
            "Calls ended early: over request_timeout_s, more waited for the client than max_unread_bytes, or masks "
            "left no token",
            CUT_REASONS,
        )
        self._stalled = self._counter(
            "stalled_connections", "Connections closed because nothing was read for reader_timeout_s"
        )
        self._structured = Counter(
            f"{PREFIX}_structured_output_requests",
            "Prompts whose output has a form to keep to, by the kind of the form",
            ["kind"],
            registry=self._registry,
        )
        for kind in KINDS:
            self._structured.labels(kind)
        self._refused_grammars = self._counter(
            "grammars_refused", "Grammars that the compiler refused, each counted when it was tried"
        )
        self._compile_s = self._histogram(
            "grammar_compile_seconds", "Processor time of each grammar that was compiled", _COMPILE_BUCKETS_S
        )
        ProcessCollector(namespace=PREFIX, registry=self._registry)
        self._first_token_s = self._histogram(
            "time_to_first_token_seconds", "Time to a sequence's first token", _FIRST_TOKEN_BUCKETS_S
        )
        self._between_tokens_s = self._histogram(
            "inter_token_latency_seconds", "Time between successive tokens of a sequence", _TOKEN_BUCKETS_S
        )
        self._per_token_s = self._histogram(
            "request_time_per_output_token_seconds",
            "Mean time between the tokens of a sequence that finished with at least two",
            _TOKEN_BUCKETS_S,
        )
        self._whole_s = self._histogram(
            "e2e_request_latency_seconds", "Time to the end of a sequence that finished", _REQUEST_BUCKETS_S
        )

    def start_sequence(self) -> SequenceMetrics:
        """A sequence is handed to a rank now."""
        return SequenceMetrics(self, time.monotonic())

    def add_prompt(self, num_tokens: int) -> None:
        """A prompt's first output has arrived."""
        self._prompt_tokens.inc(num_tokens)

    @property
    def num_prompt_tokens(self) -> int:
        """What ``prompt_tokens_total`` shows."""
        return _total(self._prompt_tokens)

    @property
    def num_generation_tokens(self) -> int:
        """What ``generation_tokens_total`` shows."""
        return _total(self._generation_tokens)

    def count_slow_step(self) -> None:
        """A step has taken longer than ``slow_step_s``."""
        self._slow_steps.inc()

    def count_refusal(self, reason: str) -> None:
        """A call was refused for one of ``REFUSAL_REASONS``."""
        self._refused.labels(reason).inc()

    def count_cut(self, reason: str) -> None:
        """A call was ended early for one of ``CUT_REASONS``."""
        self._cut.labels(reason).inc()

    def count_structured(self, kind: str, num_prompts: int) -> None:
        """Prompts ask for an output of one of ``KINDS``."""
        self._structured.labels(kind).inc(num_prompts)

    def count_grammar(self, compile_s: float | None) -> None:
        """A grammar was compiled, or refused where there is no time."""
        if compile_s is None:
            self._refused_grammars.inc()
        else:
            self._compile_s.observe(compile_s)

    def count_stalled_connection(self) -> None:
        """A connection was closed because its client read nothing."""
        self._stalled.inc()

    def exposition(self) -> bytes:
        """Everything, as text of type ``CONTENT_TYPE``."""
        return generate_latest(self._registry)

    def _counter(self, name: str, text: str) -> Counter:
        return Counter(f"{PREFIX}_{name}", text, registry=self._registry)

    def _by_reason(self, name: str, text: str, reasons: Sequence[str]) -> Counter:
        counter = Counter(f"{PREFIX}_{name}", text, ["reason"], registry=self._registry)
        for reason in reasons:
            counter.labels(reason)
        return counter

    def _histogram(self, name: str, text: str, buckets: Sequence[float]) -> Histogram:
        return Histogram(f"{PREFIX}_{name}", text, buckets=buckets, registry=self._registry)


class SequenceMetrics:
    """One sequence from hand-over to end; it ends once, later calls of ``finish`` and ``abort`` count nothing."""

    def __init__(self, metrics: Metrics, start_s: float) -> None:
        self._metrics = metrics
        self._start_s = start_s
        self._first_s: float | None = None
        self._last_s = start_s
        self._num_tokens = 0
        self._has_ended = False

    def add_tokens(self, arrivals_s: Sequence[float]) -> None:
        """Count tokens, given ``time.monotonic()`` of the arrival of each."""
        for arrival_s in arrivals_s:
            if self._first_s is None:
                self._first_s = arrival_s
                self._metrics._first_token_s.observe(arrival_s - self._start_s)
            else:
                self._metrics._between_tokens_s.observe(arrival_s - self._last_s)
            self._last_s = arrival_s
        self._num_tokens += len(arrivals_s)
        self._metrics._generation_tokens.inc(len(arrivals_s))

    def finish(self, reason: str, end_s: float) -> None:
        """The sequence has ended by itself, with what arrived at ``end_s``."""
        if self._end(reason):
            self._metrics._whole_s.observe(end_s - self._start_s)
            if self._first_s is not None and self._num_tokens > 1:
                self._metrics._per_token_s.observe((self._last_s - self._first_s) / (self._num_tokens - 1))

    def abort(self) -> None:
        """Nobody waits for it any more."""
        self._end("abort")

    def _end(self, reason: str) -> bool:
        if self._has_ended:
            return False
        assert reason in FINISH_REASONS, f"finish reason {reason} is not in {FINISH_REASONS}"
        self._has_ended = True
        self._metrics._finished.labels(reason).inc()
        return True


class _StateCollector(Collector):
    """What is looked up when asked: the deployment's settings and the ranks' latest reports."""

    def __init__(self, config: ServerConfig, ranks: Mapping[int, RankState], load: LoadTally | None) -> None:
        self._config = config
        self._ranks = ranks
        self._load = load

    def collect(self) -> Iterator[Metric]:
        """All families; those that are of a scheduler have no series for ranks that only follow one."""
        yield self._info()
        yield GaugeMetricFamily(
            f"{PREFIX}_front_end_tasks", "Tasks of the front end's event loop", value=_num_tasks()
        )
        stats = {rank: self._ranks[rank].stats for rank in sorted(self._ranks)}
        scheduling = {rank: of_rank for rank, of_rank in stats.items() if rank % self._config.tp == 0}
        yield _gauge(
            "num_requests_open",
            "Sequences given to it",
            {r: self._ranks[r].num_sequences for r in scheduling},
        )
        yield _gauge(
            "num_requests_running", "Sequences running", {r: s.num_running for r, s in scheduling.items()}
        )
        yield _gauge(
            "num_requests_waiting", "Sequences waiting", {r: s.num_waiting for r, s in scheduling.items()}
        )
        yield _gauge(
            "kv_cache_usage_perc",
            "Share of KV blocks in use, from 0 to 1",
            {r: _kv_usage(s) for r, s in scheduling.items()},
        )
        yield _gauge(
            "prefix_cache_blocks",
            "KV blocks that the prefix cache can find",
            {r: s.num_cached_kv_blocks for r, s in scheduling.items()},
        )
        yield _counter(
            "prefix_cache_queries",
            "Tokens looked up in the prefix cache",
            {r: s.num_prefix_cache_queries for r, s in scheduling.items()},
        )
        yield _counter(
            "prefix_cache_hits",
            "Tokens found in the prefix cache",
            {r: s.num_prefix_cache_hits for r, s in scheduling.items()},
        )
        yield _counter(
            "prefix_cache_evictions",
            "KV blocks that the prefix cache gave up for room",
            {r: s.num_prefix_cache_evictions for r, s in scheduling.items()},
        )
        yield _counter(
            "num_preemptions",
            "Sequences that gave their KV blocks back to be recomputed",
            {r: s.num_preemptions for r, s in scheduling.items()},
        )
        yield _counter("steps", "Steps run", {r: s.num_steps for r, s in stats.items()})
        yield _gauge(
            "last_step_seconds",
            "Time of the latest step",
            {r: s.last_step_ms / 1e3 for r, s in stats.items()},
        )
        yield _counter(
            "computed_tokens",
            "Rows run, drafts and those that a preemption made run again included",
            {r: s.num_computed_tokens for r, s in scheduling.items()},
        )
        drafting = {rank: s.speculation for rank, s in stats.items() if s.speculation is not None}
        yield from speculation_families(PREFIX, drafting)
        if self._load is not None:
            load = self._load.summary()
            yield _counter(
                "routed_pairs",
                "Pairs of a token and a slot given to the experts",
                dict(enumerate(load.pairs)),
            )
            yield from load_families(PREFIX, load, self._config.moe_layer_ids)

        moving = {rank: self._ranks[rank].rearrangement for rank in sorted(self._ranks)}
        yield from rearrangement_families(
            PREFIX, {rank: stats for rank, stats in moving.items() if stats is not None}
        )

    def _info(self) -> Metric:
        info = self._config.info
        labels = {name: str(info.get(name, "unknown")) for name in _CONFIG_LABELS}
        labels["ep_size"] = str(self._config.world_size)
        labels["tp"] = str(self._config.tp)
        labels["multiple_reduction"] = "on" if info.get("multiple_reduction") else "off"
        family = GaugeMetricFamily(f"{PREFIX}_info", "The deployment", labels=list(labels))
        family.add_metric(list(labels.values()), 1.0)
        return family


def _num_tasks() -> int:
    try:
        return len(asyncio.all_tasks())
    except RuntimeError:  # no loop runs: the metrics are looked at by a test
        return 0


def _kv_usage(stats: RankStats) -> float:
    if stats.num_kv_blocks == 0:  # no report yet
        return 0.0
    return (stats.num_kv_blocks - stats.num_free_kv_blocks) / stats.num_kv_blocks


def _total(counter: Counter) -> int:
    return next(
        int(s.value) for family in counter.collect() for s in family.samples if s.name.endswith("_total")
    )


def _gauge(name: str, text: str, values: Mapping[int, float]) -> Metric:
    family = GaugeMetricFamily(f"{PREFIX}_{name}", f"{text}, of each rank", labels=["rank"])
    for rank, value in values.items():
        family.add_metric([str(rank)], value)
    return family


def _counter(name: str, text: str, values: Mapping[int, float]) -> Metric:
    family = CounterMetricFamily(f"{PREFIX}_{name}", f"{text}, of each rank", labels=["rank"])
    for rank, value in values.items():
        family.add_metric([str(rank)], value)
    return family
