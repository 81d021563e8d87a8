"""A group of a replay, step by step and in stretches."""

from __future__ import annotations

from moe_runtime.engine.request import Request, SamplingParams
from moe_runtime.engine.scheduler import SchedulerConfig
from moe_runtime.planner.replay_group import OpenRequest, ReplayGroup


def group_of(lengths, *, windows=(None,), overlaps=False, num_blocks=50, skips=True):
    group = ReplayGroup(
        SchedulerConfig(max_num_seqs=8, max_num_batched_tokens=1024),
        num_blocks,
        prefix_cache=True,
        overlaps=overlaps,
        windows=windows,
        open_requests={},
        skips=skips,
    )
    for number, (prompt, output) in enumerate(lengths):
        group.open[str(number)] = OpenRequest(arrival_s=0.0, output_ids=())
        params = SamplingParams(max_tokens=output, ignore_eos=True, seed=0)
        group.add(Request(request_id=str(number), prompt_ids=(number + 1,) * prompt, params=params))
    return group


def test_loads_are_rows_keys_and_pairs():
    group = group_of([(10, 5), (20, 5)], windows=(None, 8))
    load = group.run()
    assert (load.decode_rows, load.prefill_rows, load.wanted_rows) == (0, 30, 2)
    assert load.longest_keys == 0, "prompts are not counted"
    assert load.prefill_pairs == [55 + 210, (36 + 2 * 8) + (36 + 12 * 8)]
    assert group.settle(1.0) == ([], [])
    load = group.run()
    assert (load.decode_rows, load.prefill_rows, load.wanted_rows) == (2, 0, 2)
    assert load.decode_keys == [11 + 21, 8 + 8]
    assert load.longest_keys == 21
    assert group.settle(1.5) == ([0.5, 0.5], [])


def test_a_stretch_lasts_until_the_step_that_ends_a_sequence():
    group = group_of([(10, 300), (20, 200)])
    group.run()
    assert group.stretch() == 0, "the results of the step are not there yet"
    group.settle(1.0)
    assert group.stretch() == 198
    assert group.stretch_load().decode_keys == [32]
    assert group.stretch_load().longest_keys == 21
    assert group.stretch_load().key_growth == [2]
    group.catch_up(199, 9.0)
    assert [s.num_output_tokens for s in group.scheduler.running] == [199, 199]
    assert group.stretch() == 0
    group.run()
    assert group.settle(9.5)[1] == ["1"]
    assert group.num_used_blocks == 4


def test_keys_of_a_window_grow_evenly_within_a_stretch():
    group = group_of([(10, 100)], windows=(16,))
    group.run()
    group.settle(1.0)
    assert group.stretch() == 6
    assert (group.stretch_load().decode_keys, group.stretch_load().key_growth) == ([11], [1])
    group.catch_up(7, 2.0)
    assert (group.stretch_load().decode_keys, group.stretch_load().key_growth) == ([16], [0])
    assert group.stretch() == 92


def test_a_stretch_is_what_steps_would_have_done():
    whole, single = group_of([(100, 300), (30, 250)]), group_of([(100, 300), (30, 250)], skips=False)
    for group in (whole, single):
        group.run()
        group.settle(1.0)
    assert single.stretch() == 0
    whole.catch_up(201, 3.0)
    for _ in range(200):
        single.run()
        single.settle(3.0)
    for left, right in zip(whole.scheduler.running, single.scheduler.running, strict=True):
        assert left.token_ids == right.token_ids
        assert left.block_ids == right.block_ids
        assert (left.num_computed_tokens, left.num_named_blocks) == (
            right.num_computed_tokens,
            right.num_named_blocks,
        )
    assert whole.num_computed_tokens == single.num_computed_tokens


def test_overlap_takes_out_what_ended_after_the_next_plan():
    for overlaps, left in ((False, 0), (True, 1)):
        group = group_of([(10, 1)], overlaps=overlaps)
        group.run()
        assert group.settle(1.0) == ([], ["0"])
        assert len(group.scheduler.running) == left
        assert group.is_idle is not overlaps
        if overlaps:
            assert group.run().wanted_rows == 0
            assert group.is_idle
