"""Metrics of drafts: one series per rank that drafts, and per place in a run."""

from __future__ import annotations

from moe_runtime.engine.messages import SpeculationStats
from moe_runtime.server.speculation_metrics import speculation_families


def samples(ranks):
    return {
        (sample.name, *sample.labels.values()): sample.value
        for family in speculation_families("p", ranks)
        for sample in family.samples
    }


def test_without_drafts_there_are_no_families():
    assert samples({}) == {}


def test_counts_are_those_of_each_rank():
    two = SpeculationStats(
        num_drafts=3, num_draft_tokens=5, num_accepted_tokens=4, accepted_per_position=(3, 1)
    )
    assert samples({0: SpeculationStats(), 2: two}) == {
        ("p_spec_decode_num_drafts_total", "0"): 0,
        ("p_spec_decode_num_draft_tokens_total", "0"): 0,
        ("p_spec_decode_num_accepted_tokens_total", "0"): 0,
        ("p_spec_decode_num_drafts_total", "2"): 3,
        ("p_spec_decode_num_draft_tokens_total", "2"): 5,
        ("p_spec_decode_num_accepted_tokens_total", "2"): 4,
        ("p_spec_decode_num_accepted_tokens_per_pos_total", "2", "0"): 3,
        ("p_spec_decode_num_accepted_tokens_per_pos_total", "2", "1"): 1,
    }
