"""Messages between the HTTP front end and the ranks, encoded with msgspec (MessagePack). Imports no torch.

The front end stamps every message with ``epoch``, a number that grows by one per message *round*: whatever it has
to say, it says to every rank (``Wake`` to those not addressed) with the same epoch. Ranks may fall asleep only when
all of them have seen the same epoch, so a message can never be slept through (see engine/step.py).
"""

from __future__ import annotations

from typing import Annotated

import msgspec

from moe_runtime.engine.kv_events import BlockEvent
from moe_runtime.engine.request import Request
from moe_runtime.engine.routed_experts import RoutedExperts

__all__ = [
    "AbortRequest",
    "AddRequest",
    "Drain",
    "ExpertLoadReport",
    "FlushCache",
    "MoveExperts",
    "MoveResult",
    "PlacementReport",
    "RankMessage",
    "RankReady",
    "RankReport",
    "RankStats",
    "RearrangementStats",
    "ReportMessage",
    "SequenceOutput",
    "SpeculationStats",
    "TokenLogprobs",
    "Wake",
    "decode_rank_message",
    "decode_report",
    "encode",
]


class TokenLogprobs(msgspec.Struct, frozen=True, array_like=True):
    """Raw log-softmax of one token, fp32 values held exactly in Python floats.

    Attributes:
        logprob: Of the token itself.
        top_ids: Most likely ids, by (logprob descending, id ascending).
        top_logprobs: Their logprobs.
    """

    logprob: float
    top_ids: tuple[int, ...] = ()
    top_logprobs: tuple[float, ...] = ()


class SequenceOutput(msgspec.Struct, frozen=True):
    """What one choice of a request gained in one step.

    Attributes:
        request_id: The request.
        choice_idx: Which of its ``n`` choices.
        token_ids: New tokens, in order; empty in an output that only ends the choice.
        logprobs: One entry per new token where asked for, else None.
        prompt_logprobs: Sent once, with the first output of choice 0: one entry per prompt token, None for the
            first of them; None where not asked for.
        finish_reason: ``stop``, ``length``, ``abort`` or ``error`` with the last output of the choice, else None.
        stop_reason: The stop token id that ended it, where one did (None for an end-of-sequence id).
        routed_experts: Where asked for, of the tokens that have run since the output before: of the whole prompt with
            the first output, then of the token before each new one.
        num_cached_tokens: With the first output, tokens of the prompt whose keys and values were in the prefix cache.
        error: With finish reason ``error``: what about the request makes it impossible to go on.
    """

    request_id: str
    choice_idx: int
    token_ids: tuple[int, ...] = ()
    logprobs: tuple[TokenLogprobs, ...] | None = None
    prompt_logprobs: tuple[TokenLogprobs | None, ...] | None = None
    finish_reason: str | None = None
    stop_reason: int | None = None
    routed_experts: RoutedExperts | None = None
    num_cached_tokens: int = 0
    error: str | None = None


class AddRequest(msgspec.Struct, frozen=True, tag="add"):
    """Start a request on this rank."""

    epoch: int
    request: Request


class AbortRequest(msgspec.Struct, frozen=True, tag="abort"):
    """Forget a request: client gone, or its choice has met a stop string.

    ``choice_idx`` None means all choices. The rank frees the KV blocks and sends nothing more about it.
    """

    epoch: int
    request_id: str
    choice_idx: int | None = None


class Wake(msgspec.Struct, frozen=True, tag="wake"):
    """Join the step loop: another rank has been given something."""

    epoch: int


class Drain(msgspec.Struct, frozen=True, tag="drain"):
    """Finish what is running, or with ``abort`` drop it, then leave the loop together and exit with ``exit_code``."""

    epoch: int
    abort: bool = False
    exit_code: int = 0


class FlushCache(msgspec.Struct, frozen=True, tag="flush"):
    """Flush the prefix caches of all ranks (rank 0); each one's ``RankStats.num_cache_flushes`` says when it has."""

    epoch: int


class MoveExperts(msgspec.Struct, frozen=True, tag="move"):
    """Move experts (rank 0): to ``physical_to_logical_map``, or without one to where they even out the load.

    The map is little-endian int32 ``[num_moe_layers, num_physical]``; ``RankReport.moves`` says how it ended.
    """

    epoch: int
    request_id: int
    physical_to_logical_map: bytes | None = None


class MoveResult(msgspec.Struct, frozen=True, array_like=True):
    """How a move that was asked for has ended.

    ``outcome`` is ``succeeded``, ``failed`` or ``abandoned`` (the ranks leave), both with layers moved that stay so, or
    ``refused``: none has started. ``reason`` is empty where it succeeded.
    """

    request_id: int
    outcome: str
    reason: str = ""


class RearrangementStats(msgspec.Struct, frozen=True):
    """Moves of experts on one rank since its start (engine/expert_mover.py).

    Attributes:
        state: ``idle``, ``planning``, ``moving``, or ``broken``: no further move can start.
        outcomes: Moves by outcome.
        last_fault: How the latest move ended, and why; empty where it succeeded.
        last_success_age_s: Time since the latest success; None before the first.
        num_bytes: Of weights that have come from other ranks.
        num_layers: Layers swapped.
        stall_s: Time that swaps have taken from steps.
        num_layers_done, num_layers_to_move: Of the move under way, 0 without one.
        balancedness_before, balancedness_after: Of the latest success, under the loads that it was planned by.
        spare_bytes: Memory set aside for moves.
        placement_sha256: Hash of where experts are now.
    """

    state: str = "idle"
    outcomes: dict[str, int] = {}
    last_fault: str = ""
    last_success_age_s: float | None = None
    num_bytes: int = 0
    num_layers: int = 0
    stall_s: float = 0.0
    num_layers_done: int = 0
    num_layers_to_move: int = 0
    balancedness_before: float = 1.0
    balancedness_after: float = 1.0
    spare_bytes: int = 0
    placement_sha256: str = ""


class PlacementReport(msgspec.Struct, frozen=True):
    """Where experts are: the map as in ``MoveExperts``, and how often each layer has changed since the start."""

    physical_to_logical_map: bytes
    versions: tuple[int, ...]


class SpeculationStats(msgspec.Struct, frozen=True):
    """Drafts of one rank since its start (engine/speculative.py).

    Attributes:
        num_drafts: Runs of drafts, one per sequence and step.
        num_draft_tokens: Tokens in them.
        num_accepted_tokens: Those of them that became output.
        accepted_per_position: The same by place in the run.
    """

    num_drafts: int = 0
    num_draft_tokens: int = 0
    num_accepted_tokens: int = 0
    accepted_per_position: tuple[int, ...] = ()


class RankStats(msgspec.Struct, frozen=True):
    """State of one rank after a step.

    ``num_computed_tokens`` are the rows of collected steps, drafts and those that a preemption made run again included,
    without those of sequences that had ended. Free KV blocks include those that the prefix cache keeps for nobody yet;
    cached ones are all that can be found again. Queries and hits of the prefix cache count tokens (block_manager.py).
    ``speculation`` is None where nothing is drafted.
    """

    num_running: int = 0
    num_waiting: int = 0
    num_kv_blocks: int = 0
    num_free_kv_blocks: int = 0
    num_cached_kv_blocks: int = 0
    num_prefix_cache_queries: int = 0
    num_prefix_cache_hits: int = 0
    num_prefix_cache_evictions: int = 0
    num_cache_flushes: int = 0
    num_preemptions: int = 0
    num_steps: int = 0
    num_prompt_tokens: int = 0
    num_generation_tokens: int = 0
    num_computed_tokens: int = 0
    last_step_ms: float = 0.0
    speculation: SpeculationStats | None = None


class RankReady(msgspec.Struct, frozen=True, tag="ready"):
    """First message of a rank: it can serve. ``info`` is shown by ``/server_info``."""

    rank: int
    pid: int
    info: dict[str, str | int | float | bool | None]


class ExpertLoadReport(msgspec.Struct, frozen=True):
    """Pairs counted on a rank in its first ``num_steps`` steps, by layer and logical expert.

    ``counts`` is little-endian int64 ``[num_moe_layers, num_experts]``. All ranks report the same steps
    (engine/expert_load.py), each when it has the counts.
    """

    num_steps: int
    counts: bytes


class RankReport(msgspec.Struct, frozen=True, tag="report"):
    """Outputs and state of one rank; also its heartbeat, sent at least once a second while idle.

    ``expert_load`` and ``moves`` are those since the report before, ``moves`` the requests that ended; ``kv_events``
    are changes of its prefix cache, where asked for. ``rearrangement`` is None where no experts can move.
    ``placement`` comes from rank 0, when it has changed.
    """

    rank: int
    epoch: int
    outputs: tuple[SequenceOutput, ...]
    stats: RankStats
    expert_load: tuple[ExpertLoadReport, ...] = ()
    rearrangement: RearrangementStats | None = None
    placement: PlacementReport | None = None
    moves: tuple[MoveResult, ...] = ()
    kv_events: tuple[BlockEvent, ...] = ()


RankMessage = AddRequest | AbortRequest | Wake | Drain | MoveExperts | FlushCache
ReportMessage = RankReady | RankReport

_encoder = msgspec.msgpack.Encoder()
_rank_decoder = msgspec.msgpack.Decoder(Annotated[RankMessage, msgspec.Meta()])
_report_decoder = msgspec.msgpack.Decoder(Annotated[ReportMessage, msgspec.Meta()])


def encode(message: RankMessage | ReportMessage) -> bytes:
    """Encode any message."""
    return _encoder.encode(message)


def decode_rank_message(data: bytes) -> RankMessage:
    """Decode a message to a rank. Raises ``msgspec.DecodeError`` on anything else."""
    return _rank_decoder.decode(data)


def decode_report(data: bytes) -> ReportMessage:
    """Decode a message from a rank. Raises ``msgspec.DecodeError`` on anything else."""
    return _report_decoder.decode(data)
