"""Runs steps on one GPU: as graphs up to some size, beyond it kernel by kernel; neither waits for the device.

A step's inputs travel in one copy from pinned memory. Tokens that the host does not know yet are taken on the device
from each sequence's slot (kernels/tokens_triton.py). Results come back by asynchronous copies and an event, which
``LaunchedStep.collect`` waits for.
"""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as SequenceOf
from dataclasses import replace

import numpy as np
import torch

from moe_runtime.comm.gpu_exchange import StepShape
from moe_runtime.engine.batch import LogitsRow, plan_step, routed_token_idx, wanted_rows
from moe_runtime.engine.device_copies import DeviceEvent, InputRing, to_host
from moe_runtime.engine.expert_load import DEFAULT_WINDOW_STEPS, DeviceExpertLoad
from moe_runtime.engine.graphs import DECODE_BUCKETS, StepGraphs, decode_bucket, mixed_bucket, mixed_buckets
from moe_runtime.engine.messages import TokenLogprobs
from moe_runtime.engine.mixed_inputs import MixedLayout, StepTiles
from moe_runtime.engine.routed_experts import RoutedExperts
from moe_runtime.engine.routing_rows import compact_routing, gather_routing
from moe_runtime.engine.runner import LaunchedStep, Runner
from moe_runtime.engine.sampler import ScoredRow, given_token, num_logprobs, row_sampling
from moe_runtime.engine.scheduler import ScheduledChunk
from moe_runtime.engine.sequence import UNKNOWN_TOKEN
from moe_runtime.engine.sequence_rules import batch_rules
from moe_runtime.engine.sequence_slots import SequenceSlots
from moe_runtime.engine.speculative import MOST_ROWS
from moe_runtime.engine.step_form import MOST_PROMPT_ROWS
from moe_runtime.engine.step_plan import StepPlan
from moe_runtime.kernels.attention import BLOCK_SIZE
from moe_runtime.kernels.attention_tree_triton import TREE
from moe_runtime.kernels.logit_rules import RowRules
from moe_runtime.kernels.logit_rules_triton import RuleRows, apply_rules
from moe_runtime.kernels.sampling_triton import SamplingRows, greedy, sample
from moe_runtime.kernels.softmax_triton import log_softmax_stats, token_logprobs, top_logprobs
from moe_runtime.kernels.tokens_triton import record_tokens, resolve_tokens
from moe_runtime.layers.cuda_decoder import MAX_DECODE_ROWS, CudaDecoder

__all__ = ["CudaRunner"]

LOGITS_ROWS = 256
RULED_ROWS = 64
"""Rows with rules of their own whose logits are rewritten at once: each takes memory for two copies."""

MIXED = "mixed"
"""Variant of the graphs of that form."""


class CudaRunner(Runner):
    """One rank's GPU.

    Args:
        decoder: The loaded model.
        num_kv_blocks: Blocks of the cache.
        overlaps: See ``Runner.overlaps``; never under tensor parallelism.
        max_num_seqs: Most sequences that run at once.
        max_model_len: Longest context, in tokens.
        use_graphs: Capture steps up to some size; else launch them kernel by kernel.
        drafts: Steps may have drafts.
        check_peers: Raises ``PeerError`` where another rank has gone or stalled: the device would wait for it for good.
        timeout_s: Of a wait for a step, after which ``PeerError`` is raised; none where no step waits for another rank.
        load_window_steps: Steps of the window of expert load.
    """

    expert_load: DeviceExpertLoad

    def __init__(
        self,
        decoder: CudaDecoder,
        num_kv_blocks: int,
        max_num_seqs: int,
        max_model_len: int,
        use_graphs: bool,
        drafts: bool = False,
        check_peers: Callable[[], None] | None = None,
        timeout_s: float | None = None,
        load_window_steps: int = DEFAULT_WINDOW_STEPS,
        overlaps: bool = True,
    ) -> None:
        config = decoder.local
        self.decoder = decoder
        # The ranks of a group run what its first one plans, token ids included.
        self.overlaps = overlaps and decoder.tensor_parallel.size == 1
        self.device = decoder.device
        self._wait_limits = (check_peers, timeout_s, decoder.waits_for)
        shape = (num_kv_blocks, config.num_kv_heads, BLOCK_SIZE, config.head_dim)
        self.kv_caches = [
            (
                torch.zeros(shape, dtype=decoder.dtype, device=self.device),
                torch.zeros(shape, dtype=decoder.dtype, device=self.device),
            )
            for _ in range(config.num_layers)
        ]
        self.max_blocks = -(-max_model_len // BLOCK_SIZE)
        self.largest_decode = min(MAX_DECODE_ROWS, max(max_num_seqs, MOST_ROWS if drafts else 1))
        self._slots = SequenceSlots(2 * max_num_seqs)
        self.last_token = torch.zeros(2 * max_num_seqs, dtype=torch.int32, device=self.device)
        self._inputs = InputRing(MAX_DECODE_ROWS * (3 + self.max_blocks) + 1, self.device, *self._wait_limits)
        self._decode_inputs = torch.zeros(
            MAX_DECODE_ROWS * (3 + self.max_blocks) + 1, dtype=torch.int32, device=self.device
        )
        self._token_ids = torch.zeros(MAX_DECODE_ROWS, dtype=torch.int32, device=self.device)
        self.logits = torch.zeros(LOGITS_ROWS, config.vocab_size, dtype=torch.float32, device=self.device)
        self.chosen = torch.zeros(LOGITS_ROWS, dtype=torch.int32, device=self.device)
        self.expert_load = DeviceExpertLoad(decoder.expert_counts, load_window_steps)
        self._max_num_seqs = max_num_seqs
        self._step_tiles = StepTiles.of(decoder.schedules, config.num_query_heads_per_kv_head)
        self.graphs = StepGraphs(self._launch_graph) if use_graphs and self.device.type == "cuda" else None
        if self.graphs is not None:
            self.most_prompt_rows = MAX_DECODE_ROWS
            if decoder.experts.has_fixed_steps and decoder.tensor_parallel.size == 1:
                self.most_prompt_rows = MOST_PROMPT_ROWS
                self.set_mixed_graphs(decoder.max_rows)

    def capture_graphs(self, on_progress: Callable[[int, int], None] | None = None) -> None:
        """Capture every variant of every bucket ahead of the first request."""
        if self.graphs is None:
            return
        longest = self.max_blocks * BLOCK_SIZE
        wanted = sorted(
            {
                (bucket, self._attention_variant(length, bucket, several_rows=several))
                for bucket in DECODE_BUCKETS
                if bucket <= max(self.largest_decode, self.most_prompt_rows)
                for length in (1, longest)
                for several in (False, bucket > 1)
            }
        )
        wanted += [(bucket, MIXED) for bucket in mixed_buckets(self.most_mixed_rows)]
        for done, (bucket, variant) in enumerate(wanted):
            if on_progress is not None:
                on_progress(done, len(wanted))
            self._prepare_graph(bucket, variant)

    def set_mixed_graphs(self, most_rows: int) -> None:
        """Run steps of the mixed form as graphs, as far as there are buckets; a rank's steps have ``most_rows``."""
        self.most_mixed_rows = most_rows = mixed_buckets(most_rows)[-1]
        size = self._mixed_layout(most_rows).size(min(most_rows, self._max_num_seqs))
        self._mixed_inputs = torch.zeros(size, dtype=torch.int32, device=self.device)
        self._mixed_token_ids = torch.zeros(most_rows, dtype=torch.int32, device=self.device)

    @torch.inference_mode()
    def launch(
        self, chunks: SequenceOf[ScheduledChunk], tokens_per_rank: SequenceOf[int], *, is_decode: bool
    ) -> LaunchedStep:
        """See ``Runner.launch``."""
        self._slots.begin_step()
        rows = wanted_rows(chunks)
        plan = plan_step(chunks, rows)
        bucket = self._bucket(tokens_per_rank, is_decode)
        if bucket is None:
            slots = [
                self._slots.slot(chunk.sequence)
                if chunk.reaches_end and chunk.sequence.token_ids[-1] == UNKNOWN_TOKEN
                else -1
                for chunk in chunks
            ]
            hidden, token_ids = self._mixed(plan, slots, tokens_per_rank)
            routing = self._routing(plan, routed_token_idx(chunks))
            return replace(self._score_hidden(rows, hidden, token_ids), routing=routing)
        slots = [-1] * len(plan.token_ids)
        for row, slot in zip(rows, self._row_slots(rows), strict=True):
            slots[row.token_idx] = slot
        self._decode(plan, slots, bucket)
        routing = self._routing(plan, routed_token_idx(chunks))
        if not rows:
            return LaunchedStep(rows, self._nothing_to_collect(), routing)
        if len(rows) == len(slots):
            places, logits = None, self.logits[: len(rows)]
        else:
            places = self._upload([row.token_idx for row in rows])
            logits = self.logits[places]
        return replace(self._score(rows, logits, self._token_ids, places, greedy_done=True), routing=routing)

    @torch.inference_mode()
    def follow(self, plan: StepPlan, tokens_per_rank: SequenceOf[int], *, is_decode: bool) -> None:
        """See ``Runner.follow``."""
        bucket = self._bucket(tokens_per_rank, is_decode)
        no_slots = [-1] * len(plan.token_ids)
        if bucket is not None:
            self._decode(plan, no_slots, bucket)
            self._routing(plan, [])
            return
        hidden, _ = self._mixed(plan, no_slots, tokens_per_rank)
        self._routing(plan, [])
        for first in range(0, len(plan.row_token_idx), LOGITS_ROWS):
            index = self._upload(list(plan.row_token_idx[first : first + LOGITS_ROWS]))
            self.decoder.logits(hidden[index])

    @torch.inference_mode()
    def uncount(self, token_idx: SequenceOf[int]) -> None:
        """See ``Runner.uncount``; the device gets to it before the next step writes to the routing buffer."""
        home = self.decoder.tensor_parallel.home_places(token_idx)
        if home:
            self.expert_load.take_out(self.decoder.buffers.routing[:, self._upload(home)])

    def _bucket(self, tokens_per_rank: SequenceOf[int], is_decode: bool) -> int | None:
        """Rows of the graph that every group of ranks runs; None for the mixed form."""
        tp = self.decoder.tensor_parallel.size
        most = max(sum(tokens_per_rank[first : first + tp]) for first in range(0, len(tokens_per_rank), tp))
        return decode_bucket(most, max(self.largest_decode, self.most_prompt_rows)) if is_decode else None

    def _decode(self, plan: StepPlan, slots: SequenceOf[int], bucket: int) -> None:
        """A row per token; logits and greedy tokens of the rows, in order.

        Args:
            plan: Of the group's step.
            slots: Of each row, where its sequence's newest token is kept and the next one will be, or -1.
            bucket: Rows of the graph.
        """
        num_rows = len(plan.token_ids)
        spans = list(zip(plan.start_positions, plan.query_lens, strict=True))
        longest = max((start + length for start, length in spans), default=1)
        several_rows = any(length > 1 for length in plan.query_lens)
        variant = self._attention_variant(longest, bucket, several_rows=several_rows)
        self._prepare_graph(bucket, variant)
        size = 1 + bucket * (3 + self.max_blocks)
        host = self._inputs.next(size)
        host.fill(-1)
        host[0] = num_rows
        token_ids, host_slots, positions, table = np.split(host[1:], [bucket, 2 * bucket, 3 * bucket])
        table = table.reshape(bucket, self.max_blocks)
        token_ids[:num_rows] = plan.token_ids
        host_slots[:num_rows] = slots
        at = 0
        for (start, length), blocks in zip(spans, plan.block_tables, strict=True):
            positions[at : at + length] = np.arange(start, start + length)
            table[at : at + length, : len(blocks)] = blocks
            at += length
        self._inputs.upload(size, self._decode_inputs)
        if self.graphs is not None:
            self.graphs.replay(bucket, variant)
        else:
            self._launch_decode(bucket, variant, rehearse=False)

    def _routing(self, plan: StepPlan, wanted: list[int]) -> Callable[[], RoutedExperts] | None:
        """Start the copy of some tokens' experts to the host, of the step just launched; None where there are none.

        A collective of the group where the plan wants routing. Comes before what records the step's event.
        """
        if not plan.wants_routing:
            return None
        tp, num_tokens = self.decoder.tensor_parallel, len(plan.token_ids)
        num_home = len(range(tp.rank, num_tokens, tp.size))
        rows = gather_routing(self.decoder.buffers.routing[:, :num_home], num_tokens, tp)
        if not wanted:
            return None
        host = to_host(rows[self._upload(wanted)])
        return lambda: compact_routing(host, self.decoder.config.num_experts)

    def _nothing_to_collect(self) -> Callable[[], list[ScoredRow]]:
        """Of a step without rows: waiting for it bounds how far the host runs ahead."""
        done = DeviceEvent(self.device)

        def collect() -> list[ScoredRow]:
            done.wait(*self._wait_limits)
            return []

        return collect

    def _attention_variant(self, longest: int, bucket: int, *, several_rows: bool = False) -> str:
        """Chunks in programs of their own where contexts are long and rows alone would not fill the GPU; keys written
        ahead where a sequence has several rows."""
        is_serial = longest <= TREE.chunk_keys or bucket > self.decoder.max_split_rows
        # Others' prompts make a bucket larger than one's own sequences: it has one form.
        keys_first = several_rows or bucket > self.largest_decode
        return ("serial" if is_serial else "split") + (", keys first" if keys_first else "")

    def _prepare_graph(self, bucket: int, variant: str) -> None:
        """Capture a graph that is not there yet, on inert inputs; the step's own are uploaded afterwards."""
        if self.graphs is None or self.graphs.has(bucket, variant):
            return
        if variant == MIXED:
            self._mixed_layout(bucket).make_inert(self._mixed_inputs)
        else:
            self._decode_inputs.fill_(-1)
            self._decode_inputs[0] = 0
        self.graphs.capture(bucket, variant)

    def _launch_graph(self, bucket: int, variant: str, rehearse: bool) -> None:
        if variant == MIXED:
            shape = StepShape.of_bucket(bucket, self.decoder.experts.num_processes)
            self._launch_mixed(self._mixed_layout(bucket), self._mixed_inputs, shape, rehearse=rehearse)
        else:
            self._launch_decode(bucket, variant, rehearse)

    def _launch_decode(self, bucket: int, variant: str, rehearse: bool) -> None:
        """Everything of a decode step that can be captured: from the inputs' buffer to greedy tokens."""
        inputs = self._decode_inputs
        num_tokens = inputs[:1]
        columns = inputs[1 : 1 + 3 * bucket].view(3, bucket)
        host_ids, slots, positions = columns[0], columns[1], columns[2]
        table = inputs[1 + 3 * bucket : 1 + bucket * (3 + self.max_blocks)].view(bucket, self.max_blocks)
        token_ids, chosen = self._token_ids[:bucket], self.chosen[:bucket]
        pdl = self.decoder.pdl
        resolve_tokens(host_ids, slots, self.last_token, token_ids)
        schedule = self.decoder.schedules.decode_attention(split=variant.startswith("split"))
        self.decoder.decode(
            token_ids, positions, table, num_tokens, self.kv_caches, schedule, self.logits[:bucket],
            keys_first=variant.endswith("keys first"), rehearse=rehearse,
        )  # fmt: skip
        greedy(self.logits[:bucket], chosen, pdl=pdl)
        record_tokens(chosen, slots, self.last_token, pdl=pdl)

    def _mixed(
        self, plan: StepPlan, slots: SequenceOf[int], tokens_per_rank: SequenceOf[int]
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Any rows, as a graph or kernel by kernel, to hidden states ``[T, hidden]``; their token ids ``[T]`` int32.

        Args:
            plan: Of the group's step.
            slots: Where each sequence's newest token is kept where the plan does not know it, else -1.
            tokens_per_rank: Of the step.
        """
        num_tokens, num_seqs = len(plan.token_ids), len(plan.query_lens)
        tiles = self._step_tiles.make(plan.query_lens, plan.start_positions)
        bucket = mixed_bucket(max(tokens_per_rank), self.most_mixed_rows)
        if bucket is None:
            layout = MixedLayout(
                num_tokens=num_tokens,
                num_seqs=num_seqs,
                max_blocks=self.max_blocks,
                num_tiles=(len(tiles[0]), len(tiles[1])),
            )
            size = layout.size(num_seqs)
            inputs = torch.empty(size, dtype=torch.int32, device=self.device)
        else:
            self._prepare_graph(bucket, MIXED)
            layout, inputs = self._mixed_layout(bucket), self._mixed_inputs
            size = layout.size(num_seqs)
        layout.fill(self._inputs.next(size), plan, slots, tiles)
        self._inputs.upload(size, inputs)
        if bucket is None:
            return self._launch_mixed(layout, inputs, StepShape.of_tokens(tokens_per_rank))
        assert self.graphs is not None, "a bucket is a graph's"
        self.graphs.replay(bucket, MIXED)
        return self.decoder.buffers.normed[:num_tokens], self._mixed_token_ids[:num_tokens]

    def _mixed_layout(self, bucket: int) -> MixedLayout:
        num_seqs = min(bucket, self._max_num_seqs)
        return MixedLayout(
            num_tokens=bucket,
            num_seqs=num_seqs,
            max_blocks=self.max_blocks,
            num_tiles=self._step_tiles.most(bucket, num_seqs),
        )

    def _launch_mixed(
        self, layout: MixedLayout, inputs: torch.Tensor, shape: StepShape, *, rehearse: bool = False
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """What of the mixed form can be captured; a graph's token ids have a place of their own."""
        host_ids, slots = layout.unknown_tokens(inputs)
        ids = torch.empty_like(host_ids) if shape.exact else self._mixed_token_ids[: layout.num_tokens]
        resolve_tokens(host_ids, slots, self.last_token, ids)
        step = layout.inputs(inputs, ids, shape, self._step_tiles)
        return self.decoder.mixed(step, self.kv_caches, rehearse=rehearse), ids

    def _score_hidden(
        self, rows: list[LogitsRow], hidden: torch.Tensor, token_ids: torch.Tensor
    ) -> LaunchedStep:
        """Logits of the wanted rows, in slices."""
        if not rows:
            return LaunchedStep(rows, self._nothing_to_collect())
        index = self._upload([row.token_idx for row in rows])
        steps = []
        for first in range(0, len(rows), LOGITS_ROWS):
            part = rows[first : first + LOGITS_ROWS]
            places = index[first : first + LOGITS_ROWS]
            logits = self.decoder.logits(hidden[places])
            steps.append(self._score(part, logits, token_ids, places, greedy_done=False))
        return LaunchedStep(rows, lambda: [result for step in steps for result in step.collect()])

    def _score(
        self,
        rows: list[LogitsRow],
        logits: torch.Tensor,
        token_ids: torch.Tensor,
        places: torch.Tensor | None = None,
        *,
        greedy_done: bool,
    ) -> LaunchedStep:
        """Choose tokens and compute logprobs of rows whose logits are there.

        Args:
            rows: One per row of ``logits``.
            logits: ``[R, vocab]`` float32.
            token_ids: ``[T]`` int32, the step's tokens.
            places: ``[R]``, the tokens of the rows among them; by default the first R.
            greedy_done: ``chosen`` holds greedy tokens of all of the step's tokens already and they are recorded.
        """
        num_rows = len(rows)
        given = [given_token(row) for row in rows]
        free = [i for i, token in enumerate(given) if token is None]
        rules = batch_rules({i: rows[i].rules for i in free})
        is_greedy = all(rows[i].sequence.params.temperature == 0 for i in free if i not in rules)
        if rules:
            last_ids = token_ids[:num_rows] if places is None else token_ids[places]
            chosen = self._choose(rows, logits, given, is_greedy, self._ruled(rows, logits, rules, last_ids))
        elif greedy_done and is_greedy and len(free) == num_rows:
            chosen = self.chosen[:num_rows] if places is None else self.chosen[places]
        else:
            chosen = self._choose(rows, logits, given, is_greedy)
        num_top = [num_logprobs(row) for row in rows]
        host_chosen = to_host(chosen)
        host_logprobs: tuple[torch.Tensor, torch.Tensor, torch.Tensor] | None = None
        if any(num is not None for num in num_top):
            stats = log_softmax_stats(logits)
            own = token_logprobs(logits, stats, chosen)
            most = max(num or 0 for num in num_top)
            top_ids, top_values = top_logprobs(logits, stats, most)
            host_logprobs = (to_host(own), to_host(top_ids), to_host(top_values))
        done = DeviceEvent(self.device)

        def collect() -> list[ScoredRow]:
            done.wait(*self._wait_limits)
            token_ids = host_chosen.tolist()
            if host_logprobs is None:
                return [ScoredRow(token_id, None) for token_id in token_ids]
            own, ids, values = (part.tolist() for part in host_logprobs)
            return [
                ScoredRow(
                    token_ids[i],
                    None
                    if num is None
                    else TokenLogprobs(own[i], tuple(ids[i][:num]), tuple(values[i][:num])),
                )
                for i, num in enumerate(num_top)
            ]

        return LaunchedStep(rows, collect)

    def _choose(
        self,
        rows: list[LogitsRow],
        logits: torch.Tensor,
        given: list[int | None],
        is_greedy: bool,
        ruled: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """``[R]`` int32 tokens: given ones, ruled ones, greedy ones, sampled ones; the sequences' slots take them.

        Args:
            rows: One per row of ``logits``.
            logits: ``[R, vocab]`` float32.
            given: Tokens that are not chosen here.
            is_greedy: All others but the ruled ones are greedy.
            ruled: ``[R]`` int32, tokens of rows that have rules, else -1.
        """
        chosen = torch.empty(len(rows), dtype=torch.int32, device=self.device)
        if is_greedy:
            greedy(logits, chosen)
        else:
            settings = [row_sampling(row, i) for i, row in enumerate(rows)]
            sample(logits, SamplingRows.of(settings, self.device), chosen)
        if ruled is not None:
            chosen = torch.where(ruled >= 0, ruled, chosen)
        if any(token is not None for token in given):
            fixed = self._upload([-1 if t is None else t for t in given])
            chosen = torch.where(fixed >= 0, fixed, chosen)
        record_tokens(chosen, self._upload(self._row_slots(rows)), self.last_token)
        return chosen

    def _row_slots(self, rows: list[LogitsRow]) -> list[int]:
        """Where the tokens that rows choose are kept, or -1: what becomes of drafts is known to the host before the
        next step is planned, and a prompt's own tokens are."""
        return [
            -1 if row.prompt_position is not None or row.is_verify else self._slots.slot(row.sequence)
            for row in rows
        ]

    def _ruled(
        self,
        rows: list[LogitsRow],
        logits: torch.Tensor,
        rules: dict[int, RowRules],
        last_ids: torch.Tensor,
    ) -> torch.Tensor:
        """``[R]`` int32: tokens of rows that have rules, chosen from logits of their own; -1 for the others."""
        result = torch.full((len(rows),), -1, dtype=torch.int32, device=self.device)
        which = list(rules)
        for first in range(0, len(which), RULED_ROWS):
            part = which[first : first + RULED_ROWS]
            rule_rows = RuleRows.of([rules[i] for i in part], part, self.device)
            own = apply_rules(logits, rule_rows, last_ids)
            chosen = torch.empty(len(part), dtype=torch.int32, device=self.device)
            sample(own, SamplingRows.of([row_sampling(rows[i], i) for i in part], self.device), chosen)
            result[rule_rows.row_idx] = chosen
        return result

    def _upload(self, values: list[int]) -> torch.Tensor:
        """``[len]`` int32 on the device, copied without waiting for the device's work."""
        host = torch.tensor(values, dtype=torch.int32, pin_memory=self.device.type == "cuda")
        return host.to(self.device, non_blocking=True)
