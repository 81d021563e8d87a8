"""Tokens that each logical expert got in the last steps: integer counts in buckets of steps, bounded memory.

A count is a (token, slot) of a real token routed to the expert; callers leave out padding, idle ranks and
rejected drafts, and count a token where it is routed. Counts of ranks are added up before they come here.

File (``save``, ``load``), a NumPy ``.npz`` archive without pickles:

    format   "moe-runtime load window 1"
    config   [num_layers, num_logical_experts, num_buckets, steps_per_bucket, num_seen_steps] int64
    steps    [buckets held] int64: steps in each bucket, oldest first
    counts   [buckets held, num_layers, num_logical_experts]: the narrowest unsigned type that holds them
"""

from __future__ import annotations

import io
import zipfile
from pathlib import Path

import numpy as np
import numpy.typing as npt

from moe_runtime.eplb.balance import Balance, HottestExpert, balance_of, hottest_expert
from moe_runtime.eplb.loads import IntArray, checked_counts
from moe_runtime.eplb.placement import ModelPlacement

__all__ = ["NUM_BUCKETS", "LoadWindow"]

FORMAT = "moe-runtime load window 1"
NUM_BUCKETS = 16
"""Of windows made by ``of_steps``."""


class LoadWindow:
    """Sliding window of counts.

    It holds the newest ``num_buckets`` buckets, the one being filled included, of ``steps_per_bucket`` steps each: more
    than ``num_steps - steps_per_bucket`` and at most ``num_steps`` steps once it has seen as many one by one.

    Args:
        num_layers: Layers with experts.
        num_logical_experts: Per layer.
        num_steps: Length of the window; a multiple of ``steps_per_bucket``.
        steps_per_bucket: Steps whose counts are added up; 1 keeps every step apart.
    """

    def __init__(
        self, num_layers: int, num_logical_experts: int, *, num_steps: int, steps_per_bucket: int = 1
    ) -> None:
        for name, value in (
            ("num_layers", num_layers),
            ("num_logical_experts", num_logical_experts),
            ("num_steps", num_steps),
            ("steps_per_bucket", steps_per_bucket),
        ):
            if value < 1:
                raise ValueError(f"{name} ({value}) must be at least 1")
        if num_steps % steps_per_bucket != 0:
            raise ValueError(
                f"num_steps ({num_steps}) must be a multiple of steps_per_bucket ({steps_per_bucket})"
            )
        self.num_layers = num_layers
        self.num_logical_experts = num_logical_experts
        self.num_steps = num_steps
        self.steps_per_bucket = steps_per_bucket
        self.num_seen_steps = 0
        num_buckets = num_steps // steps_per_bucket
        self._counts = np.zeros((num_buckets, num_layers, num_logical_experts), dtype=np.int64)
        self._steps = np.zeros(num_buckets, dtype=np.int64)
        self._newest = 0

    @classmethod
    def of_steps(cls, num_layers: int, num_logical_experts: int, num_steps: int) -> LoadWindow:
        """A window of bounded memory: at most 16 buckets. ``num_steps`` above 16 must be a multiple of 16."""
        per_bucket = max(1, num_steps // NUM_BUCKETS)
        return cls(num_layers, num_logical_experts, num_steps=num_steps, steps_per_bucket=per_bucket)

    @property
    def num_buckets(self) -> int:
        """Most buckets held."""
        return len(self._steps)

    @property
    def num_bytes(self) -> int:
        """Bytes of the counts, the same however long the window has been in use."""
        return self._counts.nbytes

    @property
    def num_held_steps(self) -> int:
        """Steps whose counts are in the window."""
        return int(self._steps.sum())

    def add(self, counts: npt.ArrayLike, num_steps: int = 1) -> None:
        """Add the counts of the newest step, or of several steps counted together.

        Args:
            counts: ``[num_layers, num_logical_experts]`` integers of at least 0.
            num_steps: Steps counted, at most ``steps_per_bucket``. They go into one bucket: the one being filled if it
                has room for all, else the next.
        """
        checked = checked_counts(counts)
        expected = (1, self.num_layers, self.num_logical_experts)
        if checked.shape != expected:
            raise ValueError(f"counts (shape {checked.shape[1:]}) must be {expected[1:]}")
        if not 1 <= num_steps <= self.steps_per_bucket:
            raise ValueError(
                f"num_steps ({num_steps}) must be in [1, steps_per_bucket ({self.steps_per_bucket})]"
            )
        if self._steps[self._newest] + num_steps > self.steps_per_bucket:
            self._newest = (self._newest + 1) % self.num_buckets
            self._counts[self._newest] = 0
            self._steps[self._newest] = 0
        self._counts[self._newest] += checked[0]
        self._steps[self._newest] += num_steps
        self.num_seen_steps += num_steps

    def copy(self) -> LoadWindow:
        """One that later steps do not change."""
        same = self._like()
        held = self.buckets()
        same._counts[: len(held)] = held
        same._restore(self.bucket_steps(), self.num_seen_steps)
        return same

    def buckets(self) -> IntArray:
        """``[buckets held, num_layers, num_logical_experts]`` int64, oldest first; empty before the first step."""
        return self._counts[self._order()]

    def bucket_steps(self) -> IntArray:
        """``[buckets held]`` int64: steps in each bucket."""
        return self._steps[self._order()]

    def totals(self) -> IntArray:
        """``[num_layers, num_logical_experts]`` int64: counts of the whole window."""
        sums: IntArray = self._counts.sum(axis=0)
        return sums

    def balance(self, placement: ModelPlacement, *, by_bucket: bool = False) -> Balance:
        """Evenness of a placement under the window's counts; before the first step all is even."""
        held = self.buckets()
        return balance_of(held if len(held) else self.totals(), placement, by_bucket=by_bucket)

    def hottest_expert(self) -> HottestExpert:
        """The expert with the largest share of its layer's tokens."""
        return hottest_expert(self.totals())

    def save(self, path: Path) -> None:
        """Write the window to a file, as described above."""
        path.write_bytes(self.dump())

    def dump(self) -> bytes:
        """The bytes of the file that ``save`` writes."""
        held = self.buckets()
        most = int(held.max()) if held.size else 0
        config = [
            self.num_layers, self.num_logical_experts, self.num_buckets, self.steps_per_bucket, self.num_seen_steps,
        ]  # fmt: skip
        file = io.BytesIO()
        np.savez_compressed(
            file,
            format=np.array(FORMAT),
            config=np.array(config, dtype=np.int64),
            steps=self.bucket_steps(),
            counts=held.astype(np.min_scalar_type(most)),
        )
        return file.getvalue()

    @classmethod
    def load(cls, path: Path) -> LoadWindow:
        """Read a window from a file; ``ValueError`` says what is wrong with one that is not."""
        try:
            with np.load(path, allow_pickle=False) as archive:
                fields = {name: archive[name] for name in archive.files}
        except (OSError, EOFError, ValueError, zipfile.BadZipFile, AttributeError, TypeError) as error:
            raise ValueError(f"load window file {path} cannot be read: {error}") from error
        missing = [name for name in ("format", "config", "steps", "counts") if name not in fields]
        if missing:
            raise ValueError(f"load window file {path}: {missing[0]} is missing")
        if str(fields["format"]) != FORMAT:
            raise ValueError(
                f"load window file {path}: format ({str(fields['format'])!r}) must be {FORMAT!r}"
            )
        if fields["config"].shape != (5,) or fields["config"].dtype.kind not in "iu":
            raise ValueError(f"load window file {path}: config ({fields['config']}) must be five integers")
        layers, experts, buckets, per_bucket, seen = (int(value) for value in fields["config"])
        window = cls(layers, experts, num_steps=buckets * per_bucket, steps_per_bucket=per_bucket)
        steps, counts = fields["steps"], fields["counts"]
        held = len(steps) if steps.ndim == 1 else -1
        if (
            not 0 <= held <= buckets
            or steps.dtype.kind not in "iu"
            or counts.shape != (held, layers, experts)
        ):
            raise ValueError(
                f"load window file {path}: steps (shape {steps.shape}) and counts (shape {counts.shape}) must be of "
                f"at most {buckets} buckets, {layers} layers and {experts} experts"
            )
        if held and not ((steps >= 1) & (steps <= per_bucket)).all():
            raise ValueError(
                f"load window file {path}: steps ({steps.tolist()}) must be in [1, {per_bucket}]"
            )
        if seen < int(steps.sum()):
            raise ValueError(
                f"load window file {path}: steps seen ({seen}) must be no fewer than {int(steps.sum())}"
            )
        if held:
            window._counts[:held] = checked_counts(counts, f"load window file {path}: counts")
        window._restore(steps.astype(np.int64), seen)
        return window

    def _like(self) -> LoadWindow:
        return LoadWindow(
            self.num_layers,
            self.num_logical_experts,
            num_steps=self.num_steps,
            steps_per_bucket=self.steps_per_bucket,
        )

    def _restore(self, steps: IntArray, num_seen_steps: int) -> None:
        """Take the first buckets as held, oldest first."""
        self._steps[: len(steps)] = steps
        self._newest = max(0, len(steps) - 1)
        self.num_seen_steps = num_seen_steps

    def _order(self) -> IntArray:
        ring = (self._newest + 1 + np.arange(self.num_buckets)) % self.num_buckets
        order: IntArray = ring[self._steps[ring] > 0]
        return order
