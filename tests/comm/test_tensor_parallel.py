"""Tensor-parallel groups: every bit arrives at its place, by both transports, in groups that step apart."""

from __future__ import annotations

import pytest
import torch

from moe_runtime.comm import tensor_parallel
from moe_runtime.comm.groups import RankGroup
from moe_runtime.comm.tensor_parallel import TensorParallel, check_tp, open_tensor_parallel
from moe_runtime.comm.transports import DispatcherName
from moe_runtime.errors import PeerError
from tests.bits import assert_bits_equal
from tests.ranks import RankContext

SHAPES = [(1, 1), (2, 1), (2, 2), (4, 2), (4, 4), (8, 2), (8, 4)]
WIDTHS = (3, 0, 5, 1)
NUM_ROWS = 4


def special(num_rows: int, width: int, seed: int) -> torch.Tensor:
    """Values that addition would not keep: a sum with zeros turns -0.0 into 0.0."""
    x = torch.randn(num_rows, width, generator=torch.Generator().manual_seed(seed))
    flat = x.view(-1)
    flat[::5] = -0.0
    flat[1::7] = torch.nan
    flat[2::7] = 1e-45
    return x


def move(context: RankContext, tp: int, transport: DispatcherName) -> list[torch.Tensor]:
    """All movements, several rounds; groups exchange unequally often, as groups without work do."""
    view = open_tensor_parallel(context.group, tp, transport)
    assert (view.rank, view.size) == (context.rank % tp, tp)
    group = context.rank // tp
    widths = WIDTHS[:tp]
    columns = []
    for round_idx in range(6 if group % 2 == 0 else 1):
        seed = 100 * group + 10 * round_idx
        for num_tokens in (0, 1, 5, 300):
            tokens = special(num_tokens, 3, seed)
            home = view.home_rows(tokens)
            assert home.shape[0] == len(range(view.rank, num_tokens, tp))
            on_device = view.num_home(torch.tensor([num_tokens], dtype=torch.int32))
            assert (on_device.dtype, on_device.tolist()) == (torch.int32, [home.shape[0]])
            assert_bits_equal(view.gather_home_rows(home, num_tokens), tokens)
        pieces = [special(NUM_ROWS, width, seed + rank) for rank, width in enumerate(widths)]
        mine, expected = pieces[view.rank], torch.cat(pieces, 1)
        gathered = view.gather_columns(mine, widths)
        assert_bits_equal(gathered, expected)
        assert_bits_equal(view.collect_columns(mine, widths), expected if view.is_first else expected[:0])
        assert_bits_equal(view.gather_rows(mine.T.contiguous(), widths), expected.T)
        items = torch.arange(seed, seed + 9)
        assert view.broadcast(items if view.is_first else None, 9).tolist() == items.tolist()
        columns.append(gathered)
    return columns


@pytest.mark.parametrize("transport", ["collective", "symmetric"])
@pytest.mark.parametrize(("world_size", "tp"), SHAPES)
def test_what_a_group_moves_keeps_every_bit(ranks, world_size, tp, transport):
    results = ranks(world_size, move, tp, transport)
    for first in range(0, world_size, tp):
        for other in results[first + 1 : first + tp]:
            for a, b in zip(results[first], other, strict=True):
                assert_bits_equal(a, b)


def move_in_another_order(context: RankContext) -> bool:
    view = open_tensor_parallel(context.group, context.world_size, "collective")
    pieces = [special(NUM_ROWS, width, rank) for rank, width in enumerate(WIDTHS)]
    gathered = view.gather_columns(pieces[view.rank], WIDTHS)
    wrong = torch.cat(pieces[::-1], 1)
    return torch.equal(gathered.view(torch.int32), wrong.view(torch.int32))


def test_control_another_order_of_ranks_is_seen(ranks):
    assert ranks(4, move_in_another_order) == [False] * 4


def test_control_a_sum_in_place_of_a_gather_would_lose_bits():
    x = special(NUM_ROWS, 5, 0)
    assert not torch.equal((x + torch.zeros_like(x)).view(torch.int32), x.view(torch.int32))


def choose(context: RankContext, fault: str) -> list[tuple[str, str]]:
    """What moves a group's sums: between hosts' memories, and as if the ranks had GPUs."""
    found = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tensor_parallel, "peer_access_fault", lambda group, device: fault)
        for wanted, device in (("auto", None), ("auto", "cuda"), ("collective", "cuda"), ("deepep", "cuda")):
            view = open_tensor_parallel(
                context.group, 2, wanted, None if device is None else torch.device(device)
            )
            found.append((view.transport, view.reason))
            assert view.on_device.transport == view.transport
        try:
            open_tensor_parallel(context.group, 2, "symmetric", torch.device("cuda"))
        except ValueError as error:
            found.append(("refused", str(error)))
    return found


def test_what_moves_a_group_s_sums_and_why(ranks):
    host = ("symmetric", "all ranks share a host's memory")
    reaches = ("symmetric", "every GPU of the group reaches the memory of all others")
    asked = ("collective", "asked for")
    assert ranks(4, choose, "") == [[host, reaches, asked, reaches]] * 4
    refused = ("refused", "dispatcher (symmetric) must be collective or auto here: no way")
    assert (
        ranks(4, choose, "no way")
        == [[host, ("collective", "no way"), asked, ("collective", "no way"), refused]] * 4
    )


def leave(context: RankContext) -> str:
    """Rank 3 of the world, rank 1 of its group, goes; the other of its group is told by whom."""
    view = open_tensor_parallel(context.group, 2, "symmetric")
    assert view.group.links is not None
    if context.rank == 3:
        view.group.links.close()
    elif context.rank == 2:
        with pytest.raises(PeerError) as raised:
            view.gather_rows(torch.zeros(1, 2), [1, 1])
        return str(raised.value)
    return ""


def test_a_rank_that_leaves_is_named_by_its_place_in_the_world(ranks):
    assert ranks(4, leave)[2].startswith("rank 3 has gone")


def shares(context: RankContext) -> tuple[list[int], list[int]]:
    view = open_tensor_parallel(context.group, context.world_size, "collective")
    return view.home_rows(torch.arange(5)).tolist(), view.bounds(5)


def test_the_docstring_s_example(ranks):
    assert ranks(2, shares) == [([0, 2, 4], [0, 2, 5]), ([1, 3], [0, 2, 5])]


def test_a_rank_alone_holds_everything():
    view = TensorParallel()
    assert view.is_first
    assert view.bounds(7) == [0, 7]
    assert view.home_rows(torch.arange(3)).tolist() == [0, 1, 2]


@pytest.mark.parametrize(("tp", "world_size"), [(2, 1), (2, 3), (3, 8), (16, 8)])
def test_a_size_that_does_not_divide_the_world_is_refused(tp, world_size):
    with pytest.raises(ValueError, match=rf"world_size \({world_size}\) must be divisible by tp \({tp}\)"):
        check_tp(tp, world_size)


def test_widths_are_those_of_the_bounds() -> None:
    group = TensorParallel(group=RankGroup(rank=1, size=3))
    assert group.bounds(8) == [0, 2, 5, 8]
    assert group.widths(8) == [2, 3, 3]


def test_tokens_at_home_are_named_by_their_places():
    views = [TensorParallel(group=RankGroup(rank=rank, size=2)) for rank in range(2)]
    assert [view.home_places([0, 3, 5, 6]) for view in views] == [[0, 3], [1, 2]]
    assert TensorParallel().home_places([4, 2]) == [4, 2]
    for view in views:
        tokens = torch.arange(7)
        assert view.home_rows(tokens)[view.home_places([3, 4, 6])].tolist() == [
            i for i in (3, 4, 6) if i % 2 == view.rank
        ]
