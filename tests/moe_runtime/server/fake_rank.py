"""Ranks that need no model: they speak the protocol and write text that depends on prompt, seed and choice only."""

from __future__ import annotations

import functools
import json
import math
import struct
import threading
import time
from dataclasses import dataclass, field
from pathlib import Path

import msgspec
import tokenizers
import zmq
from tokenizers import decoders, models, pre_tokenizers

from moe_runtime.engine.kv_events import BlockEvent
from moe_runtime.engine.messages import (
    AbortRequest,
    AddRequest,
    Drain,
    ExpertLoadReport,
    FlushCache,
    MoveExperts,
    MoveResult,
    RankMessage,
    RankReady,
    RankReport,
    RankStats,
    SequenceOutput,
    TokenLogprobs,
    decode_rank_message,
    encode,
)
from moe_runtime.engine.request import Request, RequestLimits, choice_seed
from moe_runtime.engine.routed_experts import RoutedExperts
from moe_runtime.server.processes import ProcessId
from moe_runtime.server.watch_messages import Pulse, encode_watch_message

SPECIAL_TOKENS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
VOCAB_SIZE = 256 + len(SPECIAL_TOKENS)
EOS_ID = VOCAB_SIZE - 1
NAN_ID = 200
LIMITS = RequestLimits(vocab_size=VOCAB_SIZE, max_model_len=4096, max_kv_tokens=8192, eos_token_ids=(EOS_ID,))
TEMPLATE = (
    "{% for m in messages %}{% if m.role == 'user' and m.content == 'refuse' %}"
    "{{ raise_exception('not this one') }}{% endif %}"
    "<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
STORY = "caf\u00e9 \u2603 \U0001f469\u200d\U0001f680 the quick brown fox jumps. \u6625\u306e\u6d77. "


def write_checkpoint(path: Path, generation_config: dict[str, object] | None = None) -> Path:
    """A byte-level tokenizer, one token per byte, with a chat template."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    backend = tokenizers.Tokenizer(models.BPE(vocab={c: i for i, c in enumerate(alphabet)}, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens(list(SPECIAL_TOKENS))
    path.mkdir(parents=True, exist_ok=True)
    backend.save(str(path / "tokenizer.json"))
    config = {"eos_token": "<|im_end|>", "chat_template": TEMPLATE}
    (path / "tokenizer_config.json").write_text(json.dumps(config))
    (path / "generation_config.json").write_text(json.dumps(generation_config or {}))
    return path


def byte_ids(text: str) -> list[int]:
    """Ids of plain text in the tokenizer of ``write_checkpoint``."""
    index = _id_of_byte()
    return [index[byte] for byte in text.encode()]


@functools.cache
def _id_of_byte() -> dict[int, int]:
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [b for b in range(256) if b not in printable]
    character = {b: chr(b) for b in printable} | {b: chr(256 + i) for i, b in enumerate(others)}
    index = {c: i for i, c in enumerate(alphabet)}
    return {byte: index[character[byte]] for byte in range(256)}


def fp32(value: float) -> float:
    """The float32 nearest to ``value``."""
    result: float = struct.unpack("f", struct.pack("f", value))[0]
    return result


def token_logprobs(token_id: int, position: int, num_top: int) -> TokenLogprobs:
    """What the fake model thinks: the token itself is the most likely one; id 0 is impossible.

    ``NAN_ID`` breaks it.
    """
    logprob = math.nan if token_id == NAN_ID else fp32(-0.1 - token_id / 977 - position / 1013)
    ids = [token_id, *[(token_id + 1 + i) % VOCAB_SIZE for i in range(num_top)]][:num_top]
    top = [logprob if i == 0 else fp32(logprob - i / 3) for i in range(num_top)]
    top = [float("-inf") if token == 0 else value for token, value in zip(ids, top, strict=True)]
    return TokenLogprobs(logprob, tuple(ids), tuple(top))


def fake_routing(first: int, end: int) -> RoutedExperts:
    """Of the tokens at positions ``first`` to ``end``: two layers, three slots."""
    ids = [(7 * position + i) % 16 for position in range(first, end) for i in range(6)]
    return RoutedExperts("uint8", (end - first, 2, 3), bytes(ids))


def output_ids(request: Request, choice_idx: int) -> tuple[list[int], str, int | None]:
    """Ids, finish reason and stop reason of a choice: a function of the request alone.

    A prompt that ends with ``!`` gets an end-of-sequence id after 20 tokens.
    """
    params = request.params
    assert params.max_tokens is not None
    assert params.seed is not None
    if params.forced_token_ids is not None:
        return list(params.forced_token_ids), "length", None
    seed = choice_seed(params.seed, choice_idx)
    text = f"{seed:x}:{len(request.prompt_ids)} " + STORY * (1 + params.max_tokens // 40)
    ids = byte_ids(text)
    if request.prompt_ids[-1] == byte_ids("!")[0]:
        ids[20:20] = [EOS_ID]
    for position, token_id in enumerate(ids[: params.max_tokens]):
        if token_id == EOS_ID and not params.ignore_eos:
            return ids[: position + 1], "stop", None
        if token_id in params.stop_token_ids:
            return ids[: position + 1], "stop", token_id
    return ids[: params.max_tokens], "length", None


@dataclass
class Sequence:
    """One choice in progress."""

    request: Request
    choice_idx: int
    num_sent: int = 0
    num_steps: int = 0

    def is_started(self) -> bool:
        """Whether the output that was made last is not the first."""
        return self.num_steps > 1

    @functools.cached_property
    def output(self) -> tuple[list[int], str, int | None]:
        """See ``output_ids``."""
        return output_ids(self.request, self.choice_idx)

    def step(self, num_tokens: int) -> SequenceOutput:
        """The next output."""
        self.num_steps += 1
        params = self.request.params
        ids, finish_reason, stop_reason = self.output
        start, end = self.num_sent, min(len(ids), self.num_sent + num_tokens)
        logprobs = prompt_logprobs = None
        if params.logprobs is not None:
            logprobs = tuple(token_logprobs(ids[i], i, params.logprobs) for i in range(start, end))
        if params.prompt_logprobs is not None and start == 0 and self.choice_idx == 0:
            prompt = self.request.prompt_ids
            known = [token_logprobs(prompt[i], i, params.prompt_logprobs) for i in range(1, len(prompt))]
            prompt_logprobs = (None, *known)
        routed = None
        if params.return_routed_experts:
            num_prompt = len(self.request.prompt_ids)
            first = 0 if start == 0 else num_prompt + start - 1
            routed = fake_routing(first, num_prompt + max(end - 1, 0))
        self.num_sent = end
        has_ended = end == len(ids)
        return SequenceOutput(
            request_id=self.request.request_id,
            choice_idx=self.choice_idx,
            token_ids=tuple(ids[start:end]),
            logprobs=logprobs,
            prompt_logprobs=prompt_logprobs,
            finish_reason=finish_reason if has_ended else None,
            stop_reason=stop_reason if has_ended else None,
            routed_experts=routed,
        )


@dataclass
class FakeRank:
    """State of one rank; its messages are kept in ``received``."""

    rank: int
    socket: zmq.Socket[bytes] | None = None
    watch: zmq.Socket[bytes] | None = None
    received: list[RankMessage] = field(default_factory=list)
    sequences: list[Sequence] = field(default_factory=list)
    last_report: float = 0.0
    is_silent: bool = False
    expert_load: tuple[ExpertLoadReport, ...] = ()
    is_draining: bool = False
    moves: list[MoveResult] = field(default_factory=list)

    @property
    def epochs(self) -> list[int]:
        """Epochs of all messages, in order of arrival."""
        return [message.epoch for message in self.received]


class FakeRanks(threading.Thread):
    """All ranks of a server, in one thread. ``hold`` stops generation; ``step_s`` slows it.

    With ``watch_endpoint`` they send pulses, but for those that are silent.
    """

    def __init__(
        self,
        endpoint: str,
        world_size: int,
        *,
        tokens_per_step: int = 3,
        step_s: float = 0.0,
        watch_endpoint: str | None = None,
    ) -> None:
        super().__init__(name="fake-ranks", daemon=True)
        self.ranks = [FakeRank(rank) for rank in range(world_size)]
        self.hold = threading.Event()
        self.tokens_per_step = tokens_per_step
        self.step_s = step_s
        self.num_cached_tokens = 0
        self.num_flushes = 0
        self.kv_events: tuple[BlockEvent, ...] = ()
        self.move_outcome: tuple[str, str] | None = ("succeeded", "")
        self._endpoint = endpoint
        self._watch_endpoint = watch_endpoint
        self._stop_requested = threading.Event()
        self._to_kill: set[int] = set()

    @property
    def num_sequences(self) -> int:
        """Choices that have not ended."""
        return sum(len(rank.sequences) for rank in self.ranks)

    def messages(self, kind: type) -> list[RankMessage]:
        """Messages of one kind, to any rank."""
        return [m for rank in self.ranks for m in list(rank.received) if isinstance(m, kind)]

    def kill(self, rank: int) -> None:
        """Close a rank's connection, as the kernel does for a killed process."""
        self._to_kill.add(rank)

    def stop(self) -> None:
        """Leave and close everything."""
        self._stop_requested.set()
        self.join(10)

    def run(self) -> None:
        """The thread."""
        context = zmq.Context()
        for rank in self.ranks:
            rank.socket = context.socket(zmq.DEALER)
            rank.socket.setsockopt(zmq.IDENTITY, b"rank-%d" % rank.rank)
            rank.socket.setsockopt(zmq.LINGER, 0)
            rank.socket.connect(self._endpoint)
            if self._watch_endpoint is not None:
                rank.watch = context.socket(zmq.DEALER)
                rank.watch.setsockopt(zmq.IDENTITY, b"rank-%d" % rank.rank)
                rank.watch.setsockopt(zmq.LINGER, 0)
                rank.watch.connect(self._watch_endpoint)
            rank.socket.send(
                encode(
                    RankReady(
                        rank=rank.rank,
                        pid=1000 + rank.rank,
                        info={"device": "fake", "dispatcher": "symmetric"},
                    )
                )
            )
        poller = zmq.Poller()
        for rank in self.ranks:
            poller.register(rank.socket, zmq.POLLIN)
        while not self._stop_requested.is_set():
            busy = self.num_sequences > 0 and not self.hold.is_set()
            poller.poll(1 if busy else 20)
            for rank in self.ranks:
                if rank.socket is not None and (rank.rank in self._to_kill or self._has_left(rank)):
                    poller.unregister(rank.socket)
                    rank.socket.close()
                    rank.socket = None
                if rank.socket is not None:
                    self._serve(rank)
            if self.step_s and busy:
                time.sleep(self.step_s)
        for rank in self.ranks:
            for socket in (rank.socket, rank.watch):
                if socket is not None:
                    socket.close()
        context.term()

    def _has_left(self, rank: FakeRank) -> bool:
        return rank.is_draining and all(r.is_draining and not r.sequences for r in self.ranks)

    def _serve(self, rank: FakeRank) -> None:
        assert rank.socket is not None
        while rank.socket.poll(0):
            self._take(rank, decode_rank_message(rank.socket.recv()))
        outputs = []
        if not self.hold.is_set():
            outputs = [
                msgspec.structs.replace(
                    sequence.step(self.tokens_per_step),
                    num_cached_tokens=0 if sequence.is_started() else self.num_cached_tokens,
                )
                for sequence in rank.sequences
            ]
            ended = {(o.request_id, o.choice_idx) for o in outputs if o.finish_reason is not None}
            rank.sequences = [s for s in rank.sequences if (s.request.request_id, s.choice_idx) not in ended]
        now = time.monotonic()
        if outputs or rank.moves or (now - rank.last_report > 0.1 and not rank.is_silent):
            rank.last_report = now
            epoch = rank.epochs[-1] if rank.received else 0
            stats = RankStats(
                num_running=len(rank.sequences),
                num_kv_blocks=128,
                num_free_kv_blocks=128,
                num_cache_flushes=self.num_flushes,
            )
            moves, rank.moves = tuple(rank.moves), []
            loads, rank.expert_load = rank.expert_load, ()
            events = ()
            if rank.rank == 0:
                events, self.kv_events = self.kv_events, ()
            rank.socket.send(
                encode(
                    RankReport(
                        rank.rank,
                        epoch,
                        tuple(outputs),
                        stats,
                        loads,
                        moves=moves,
                        kv_events=events,
                    )
                )
            )
            if rank.watch is not None and not rank.is_silent:
                process = ProcessId(pid=1000 + rank.rank, start_ticks=0, host="elsewhere")
                rank.watch.send(encode_watch_message(Pulse(rank=rank.rank, process=process)))

    def _take(self, rank: FakeRank, message: RankMessage) -> None:
        rank.received.append(message)
        if isinstance(message, AddRequest):
            rank.sequences += [Sequence(message.request, i) for i in range(message.request.params.n)]
        elif isinstance(message, AbortRequest):
            rank.sequences = [
                s
                for s in rank.sequences
                if s.request.request_id != message.request_id
                or message.choice_idx not in (None, s.choice_idx)
            ]
        elif isinstance(message, FlushCache):
            self.num_flushes += 1
        elif isinstance(message, MoveExperts) and self.move_outcome is not None:
            rank.moves.append(MoveResult(message.request_id, *self.move_outcome))
        elif isinstance(message, Drain):
            rank.is_draining = True
            if message.abort:
                rank.sequences = []
