"""Messages of the watch between front end and ranks: signs of life, faults, and what ends all. Encoded with msgspec.

They have a socket of their own, which a thread of each process serves, so that they come and go whatever the process
is busy with. A process that is stopped, or stuck in native code with the interpreter's lock, sends none.
"""

from __future__ import annotations

import msgspec

from moe_runtime.server.processes import ProcessId

__all__ = [
    "Goodbye",
    "LastWords",
    "Pulse",
    "RankWatchMessage",
    "Sign",
    "Verdict",
    "WatchMessage",
    "decode_rank_watch_message",
    "decode_watch_message",
    "encode_watch_message",
]


class Pulse(msgspec.Struct, frozen=True, kw_only=True, tag="pulse"):
    """A rank lives.

    Attributes:
        rank: The rank.
        process: Its process.
        is_starting: Before it can serve.
        phase: What its main thread is doing.
        waits: Whether that is waiting for other ranks.
        step: Number of its step under way, or of the last one.
        step_s: Time in the step under way; 0 between steps.
        numbers: Of that step, in words.
        slow_step: Number of the latest step that ended over the limit; 0 if none.
        slow_step_s: How long that one took.
    """

    rank: int
    process: ProcessId
    is_starting: bool = False
    phase: str = ""
    waits: bool = False
    step: int = 0
    step_s: float = 0.0
    numbers: str = ""
    slow_step: int = 0
    slow_step_s: float = 0.0


class LastWords(msgspec.Struct, frozen=True, kw_only=True, tag="words"):
    """A rank ends because of a fault.

    Attributes:
        rank: Who says so.
        reason: Why.
        culprit: The rank at fault as far as it knows; None where it cannot tell.
    """

    rank: int
    reason: str
    culprit: int | None = None


class Goodbye(msgspec.Struct, frozen=True, kw_only=True, tag="goodbye"):
    """A rank has drained and leaves."""

    rank: int


class Sign(msgspec.Struct, frozen=True, kw_only=True, tag="sign"):
    """The front end lives."""

    process: ProcessId


class Verdict(msgspec.Struct, frozen=True, kw_only=True, tag="verdict"):
    """All end now.

    Attributes:
        reason: The first fault.
        rank: The rank at fault; None where it is no rank's.
        process: A process that hangs and cannot end itself: its neighbours on the same host end it.
    """

    reason: str
    rank: int | None = None
    process: ProcessId | None = None


WatchMessage = Pulse | LastWords | Goodbye
RankWatchMessage = Sign | Verdict

_encoder = msgspec.msgpack.Encoder()
_decoder: msgspec.msgpack.Decoder[WatchMessage] = msgspec.msgpack.Decoder(WatchMessage)
_rank_decoder: msgspec.msgpack.Decoder[RankWatchMessage] = msgspec.msgpack.Decoder(RankWatchMessage)


def encode_watch_message(message: WatchMessage | RankWatchMessage) -> bytes:
    """Encode any message."""
    return _encoder.encode(message)


def decode_watch_message(data: bytes) -> WatchMessage:
    """Decode a message of a rank. Raises ``msgspec.DecodeError`` on anything else."""
    return _decoder.decode(data)


def decode_rank_watch_message(data: bytes) -> RankWatchMessage:
    """Decode a message to a rank. Raises ``msgspec.DecodeError`` on anything else."""
    return _rank_decoder.decode(data)
