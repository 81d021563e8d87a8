"""Rows of a group: every rank's bits over virtual ranks of symmetric memory, and one rank's in the engine."""

from __future__ import annotations

from itertools import count
from pathlib import Path
from typing import Any

import pytest
import torch

from moe_runtime.comm.exchange_bytes import MAX_LOGIT_ROWS, row_gather_bytes, row_gather_rows
from moe_runtime.comm.groups import RankGroup
from moe_runtime.errors import CapacityError
from tests.bits import assert_bits_equal, hostile
from tests.kernels.triton_interpreter import DEVICE
from tests.moe_runtime.layers.test_shard_sum import SharedRegions
from tests.moe_runtime.layers.test_spread_experts import LIMITS, expected, folder, outputs
from tests.ranks import RankContext

from moe_runtime.comm import symmetric_all_reduce  # isort: skip
from moe_runtime.comm.symmetric_memory import SymmetricSpace  # isort: skip
from moe_runtime.comm.tensor_parallel import TensorParallel  # isort: skip
from moe_runtime.layers import row_gather, shard_sum  # isort: skip
from moe_runtime.layers.row_gather import (  # isort: skip
    CollectiveRowGather,
    RowGather,
    SymmetricRowGather,
    open_row_gather,
)
from moe_runtime.layers.shard_sum import SymmetricShardSum  # isort: skip
from moe_runtime.engine.cuda_runner import LOGITS_ROWS  # isort: skip
from moe_runtime.layers.cuda_buffers import MAX_DECODE_ROWS  # isort: skip
from tests.gpu_engine import gpu_llm  # isort: skip

__all__ = ["expected", "folder"]

HIDDEN, VOCAB, NUM_LAYERS, MAX_ROWS = 48, 37, 3, 21
BF16 = torch.bfloat16
STEPS = [(7, 3, True), (1, 2, True), (MAX_ROWS, 3, True), (2, 1, False), (4, 0, False), (5, 3, True)]
"""Rows, layers that run, and whether embedding rows are gathered first: odd and even numbers of calls."""


def virtual_gathers(size: int) -> list[SymmetricRowGather]:
    num_bytes = row_gather_bytes(size, HIDDEN, VOCAB, NUM_LAYERS, MAX_ROWS, BF16.itemsize)
    spaces = SymmetricSpace.virtual(size, num_bytes, DEVICE)
    made = [
        SymmetricRowGather(space, HIDDEN, VOCAB, NUM_LAYERS, MAX_ROWS, BF16, live=False) for space in spaces
    ]
    assert all(each.num_bytes == num_bytes for each in made)
    return made


def rows_of(num_rows: int, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    residual, normed = hostile("heavy_tailed", (2, num_rows, HIDDEN), seed=seed).to(DEVICE, BF16)
    return residual, normed


def put_home(rows: RowGather, rank: int, residual: torch.Tensor, normed: torch.Tensor) -> None:
    """As a layer does; what is past the rows at home holds anything."""
    for places, values in zip(rows.home_places(len(residual)), (residual, normed), strict=True):
        own = values[rank :: rows.size]
        places.fill_(float("nan"))
        places[: len(own)].copy_(own)


def put_owned(
    rows: RowGather, rank: int, tokens: torch.Tensor, ends: torch.Tensor, table: torch.Tensor
) -> None:
    first = 0 if rank == 0 else int(ends[rank - 1])
    own = (tokens >= first) & (tokens < int(ends[rank]))
    rows.owned_places(len(tokens)).copy_(torch.where(own[:, None], table[tokens.long()], float("nan")))


def check_columns(gathers: list[SymmetricRowGather], num_rows: int, seed: int) -> None:
    logits = hostile("heavy_tailed", (num_rows, VOCAB), seed=seed).to(DEVICE)
    bounds = TensorParallel(group=RankGroup(size=len(gathers))).bounds(VOCAB)
    own = []
    for rank, rows in enumerate(gathers):
        places, room = rows.column_places(num_rows)
        assert room == MAX_LOGIT_ROWS
        places.copy_(logits[:, bounds[rank] : bounds[rank + 1]])
        own.append(places)
    for rows, places in zip(gathers, own, strict=True):
        out = torch.full((num_rows, VOCAB), float("inf"), device=DEVICE)
        rows.gather_columns(places, out)
        assert_bits_equal(out, logits, "logits")


def poisoned(num_rows: int) -> torch.Tensor:
    return torch.full((num_rows, HIDDEN), float("inf"), dtype=BF16, device=DEVICE)


@pytest.mark.parametrize("size", [2, 4])
def test_virtual_ranks_have_all_rows_in_steps_of_any_number_of_calls(size):
    gathers = virtual_gathers(size)
    ends = torch.tensor([10 * (rank + 1) for rank in range(size)], dtype=torch.int32, device=DEVICE)
    table = hostile("normal", (10 * size, HIDDEN), seed=1).to(DEVICE, BF16)
    for step, (num_rows, num_layers, embeds) in enumerate(STEPS):
        for rows in gathers:
            rows.begin_step()
        tokens = (torch.arange(num_rows, dtype=torch.int32, device=DEVICE) * 7 + step) % (10 * size)
        if embeds:
            for rank, rows in enumerate(gathers):
                put_owned(rows, rank, tokens, ends, table)
            for rows in gathers:
                out = poisoned(num_rows)
                rows.gather_owned(tokens, ends, out)
                assert_bits_equal(out, table[tokens.long()], f"embedding of step {step}")
        for layer in range(num_layers):
            residual, normed = rows_of(num_rows, 100 * step + layer)
            for rank, rows in enumerate(gathers):
                put_home(rows, rank, residual, normed)
            for rows in gathers:
                outs = poisoned(num_rows), poisoned(num_rows)
                rows.gather_home(*outs)
                assert_bits_equal(outs[0], residual, f"step {step}, layer {layer}")
                assert_bits_equal(outs[1], normed, f"step {step}, layer {layer}")
        if step % 2 == 0:
            check_columns(gathers, num_rows, step)
        for rows in gathers:
            rows.end_step()
    for rows in gathers:
        rows.begin_step()
    check_columns(gathers, MAX_LOGIT_ROWS, 9)
    with pytest.raises(ValueError, match=r"logits of 257 rows; must be at most 256 at once"):
        gathers[0].column_places(MAX_LOGIT_ROWS + 1)


def test_all_rows_that_get_logits_at_once_have_room():
    assert max(LOGITS_ROWS, MAX_DECODE_ROWS) <= MAX_LOGIT_ROWS


def test_sets_alternate_and_a_step_of_an_odd_number_ends_in_a_barrier(monkeypatch):
    (rows,) = virtual_gathers(1)
    barriers = []
    monkeypatch.setattr(row_gather, "peer_barrier", lambda flags, channel, pdl: barriers.append(channel))
    for num_calls, num_barriers in ((1, 1), (2, 0), (3, 1), (4, 0), (0, 0)):
        barriers.clear()
        places = []
        for _ in range(num_calls):
            residual, normed = rows.home_places(2)
            assert normed.data_ptr() == residual.data_ptr() + residual.nbytes
            assert rows.owned_places(2).data_ptr() == residual.data_ptr()
            places.append(residual.data_ptr())
            rows.gather_home(poisoned(2), poisoned(2))
        rows.end_step()
        assert barriers == [NUM_LAYERS + 2] * num_barriers
        assert len(set(places)) == min(2, num_calls)
        assert places[2:] == places[: max(0, num_calls - 2)]
    own, out = rows.column_places(2)[0], torch.empty(2, VOCAB, device=DEVICE)
    for num_calls, num_barriers in ((1, 0), (2, 0), (0, 1), (0, 1), (3, 0)):
        barriers.clear()
        for _ in range(num_calls):
            rows.gather_home(poisoned(2), poisoned(2))
        rows.gather_columns(own, out)
        rows.end_step()
        assert len(barriers) == num_barriers, "logits alone, or else waiting for them is barrier enough"
    rows.gather_columns(own, out)
    with pytest.raises(AssertionError, match="logits are gathered once a step"):
        rows.gather_columns(own, out)
    with pytest.raises(AssertionError, match="logits come last in a step"):
        rows.gather_home(poisoned(2), poisoned(2))
    rows.end_step()
    for _ in range(NUM_LAYERS + 1):
        rows.gather_home(poisoned(2), poisoned(2))
    with pytest.raises(AssertionError, match="more than 4 calls in a step"):
        rows.gather_home(poisoned(2), poisoned(2))


def test_calls_do_not_share_channels_and_a_missing_flag_is_named():
    spaces = SymmetricSpace.virtual(2, row_gather_bytes(2, HIDDEN, VOCAB, NUM_LAYERS, MAX_ROWS, 2), DEVICE)
    rows = SymmetricRowGather(spaces[0], HIDDEN, VOCAB, NUM_LAYERS, MAX_ROWS, BF16, first_rank=4)
    assert rows.flags is not None
    rows.begin_step()
    words = spaces[0].buffers["row_gather_flags"].local
    assert words.shape == (NUM_LAYERS + 3, 2)
    missing = [
        "its rows of the embedding are there",
        *(f"its tokens' rows after the experts of layer {i} are there" for i in range(NUM_LAYERS)),
        "its logits are there",
        "it has read the step's last rows",
    ]
    for channel, what in enumerate(missing):
        words[channel, 0] = 1
        assert rows.flags.reason() == (f"rank 5 has not raised the flag of step 1 that says that {what}", 5)
        words[channel, 1] = 1
    assert rows.flags.reason() == ("", None)


def test_the_transport_of_the_group_chooses():
    sizes = HIDDEN, VOCAB, NUM_LAYERS, MAX_ROWS, 8, BF16
    for transport in ("collective", "symmetric"):
        group = TensorParallel(group=RankGroup(rank=1, size=2), transport=transport)
        made = open_row_gather(group, *sizes, torch.device("cpu"))
        assert isinstance(made, CollectiveRowGather), (
            "CPU ranks have no kernels that reach each other's memory"
        )
        assert made.num_bytes == 0
        assert len(made.owned_places(MAX_ROWS)) == MAX_ROWS
        residual, normed = made.home_places(MAX_ROWS)
        assert residual.shape == normed.shape == (11, HIDDEN)
        alone = made.rehearsal()
        assert alone.owned_places(3).data_ptr() == residual.data_ptr()
        out = poisoned(3)
        alone.gather_home(out, poisoned(3))
        assert not out.any(), "what others would send is zero"


def test_a_rank_alone_has_no_buffers():
    made = open_row_gather(
        TensorParallel(), HIDDEN, VOCAB, NUM_LAYERS, MAX_ROWS, 8, BF16, torch.device(DEVICE)
    )
    assert made.owned_places(MAX_ROWS).numel() == 0


@pytest.mark.parametrize("size", [1, 2, 3, 4])
def test_a_set_holds_both_kinds_of_rows(size):
    for max_rows in (1, 5, 8, 9):
        assert row_gather_rows(size, max_rows) >= max(max_rows, 2 * -(-max_rows // size))


def gather_by_collective(context: RankContext) -> None:
    tp = TensorParallel(group=context.group)
    rows = CollectiveRowGather(tp, HIDDEN, VOCAB, MAX_ROWS, BF16, torch.device("cpu"))
    ends = torch.tensor([10, 20], dtype=torch.int32)
    table = hostile("normal", (20, HIDDEN), seed=1).to(BF16)
    for num_rows in (1, 4, 7):
        tokens = (torch.arange(num_rows, dtype=torch.int32) * 7) % 20
        put_owned(rows, context.rank, tokens, ends, table)
        out, other = poisoned(num_rows).cpu(), poisoned(num_rows).cpu()
        rows.gather_owned(tokens, ends, out)
        assert_bits_equal(out, table[tokens.long()], "embedding")
        residual, normed = (each.cpu() for each in rows_of(num_rows, num_rows))
        put_home(rows, context.rank, residual, normed)
        rows.gather_home(out, other)
        assert_bits_equal(out, residual, "residual")
        assert_bits_equal(other, normed, "normed")
        logits, found = hostile("normal", (num_rows, VOCAB), seed=2), torch.empty(num_rows, VOCAB)
        own, room = rows.column_places(num_rows)
        assert room == num_rows
        first = tp.bounds(VOCAB)[context.rank]
        own.copy_(logits[:, first : first + own.shape[1]])
        rows.gather_columns(own, found)
        assert_bits_equal(found, logits, "logits")


def test_by_torch_distributed_the_rows_are_the_same(ranks):
    ranks(2, gather_by_collective)


def run_engine(context: RankContext, model: str, folder: Path, turned: bool):
    """An engine whose ranks read each other's memory; the interpreter's flags do not wait, so the group does."""
    used = []

    def between(module: Any, name: str) -> Any:
        kernel = getattr(module, name)

        def meet(*arguments: Any, **more: Any) -> None:
            flags = arguments[3 if name == "gather_home_rows" else 2]
            waits = int(flags.step) != 0
            if waits:
                context.group.all_gather_bytes(b"")
            kernel(*arguments, **more)
            if waits:
                if turned and name == "gather_home_rows":
                    arguments[-2].copy_(arguments[-2].flip(0))
                context.group.all_gather_bytes(b"")
                used.append(name)

        return meet

    files = (folder / f"{number}" for number in count())
    with pytest.MonkeyPatch.context() as patch:
        for module in (row_gather, shard_sum):
            patch.setattr(module, "reads_from_peers", lambda *_: True)
        patch.setattr(
            SymmetricSpace,
            "connect",
            lambda group, num_bytes, device: SharedRegions(context, next(files)).connect(
                group, num_bytes, device
            ),
        )
        for name in ("all_reduce_one_shot", "all_reduce_exchange"):
            patch.setattr(symmetric_all_reduce, name, between(symmetric_all_reduce, name))
        for name in ("gather_home_rows", "gather_owned_rows", "gather_columns"):
            patch.setattr(row_gather, name, between(row_gather, name))
        llm = gpu_llm(Path(model), group=context.group, dispatcher="collective", tp=2, **LIMITS)
        decoder = llm.model.decoder
        assert isinstance(decoder.row_gather, SymmetricRowGather)
        assert isinstance(decoder.shard_sum, SymmetricShardSum)
        found = outputs(llm)
        assert not isinstance(decoder.row_gather.rehearsal(), CollectiveRowGather)
        assert decoder.waits_for()[1] is None
        counts = {name: used.count(name) for name in set(used)}
        rehearse(llm, decoder.row_gather)
        assert len(used) == sum(counts.values()), "a rehearsal meets nobody"
        return found, counts


def rehearse(llm: Any, rows: SymmetricRowGather) -> None:
    """A step of nobody leaves the step's number and all that peers read and write as it was."""
    runner = llm.engine.runner
    before = rows._space.region.clone(), rows._steps.count.clone()
    runner._decode_inputs.fill_(-1)  # inert rows, as for a capture
    runner._decode_inputs[0] = 0
    with torch.inference_mode():
        runner._launch_decode(2, "serial", rehearse=True)
    assert torch.equal(rows._space.region, before[0])
    assert torch.equal(rows._steps.count, before[1])


def test_an_engine_that_reads_its_peers_rows_has_the_bits_of_one_rank(ranks, folder, expected, tmp_path):
    for found, used in ranks(2, run_engine, str(folder), tmp_path, False):
        assert used["gather_home_rows"] == 2 * used["gather_owned_rows"] > 0, "a call a layer, one a step"
        assert used["gather_columns"] >= used["gather_owned_rows"]
        assert found == expected


def test_control_rows_of_other_tokens_show(ranks, folder, expected, tmp_path):
    for found, _ in ranks(2, run_engine, str(folder), tmp_path, True):
        assert found != expected


def refuse(context: RankContext, model: str) -> str:
    """Rank 1 of the group has no room for its region."""

    def connect(group: RankGroup, num_bytes: int, device: torch.device) -> SymmetricSpace:
        raise CapacityError("rank 1: no room")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(row_gather, "reads_from_peers", lambda *_: True)
        patch.setattr(row_gather.SymmetricSpace, "connect", connect)
        try:
            gpu_llm(Path(model), group=context.group, dispatcher="collective", tp=2, **LIMITS)
        except CapacityError as error:
            return str(error)
        return ""


def test_a_group_without_room_says_what_to_lower(ranks, folder):
    for message in ranks(2, refuse, str(folder)):
        assert "no room for steps of 256 tokens: lower max_num_batched_tokens" in message
