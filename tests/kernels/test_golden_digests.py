"""Golden digests: committed values of canonical outputs, and the files that hold them."""

from __future__ import annotations

import pytest
import torch

from moe_runtime.kernels.golden_digests import (
    compare_golden,
    cpu_digests,
    cpu_key,
    digest,
    read_golden,
    write_golden,
)


def test_canonical_outputs_on_this_cpu_have_the_committed_digests():
    """A failure means changed bits: undo the change, or raise NUMERICS_VERSION and write the digests again."""
    expected = read_golden("cpu", cpu_key())
    if expected is None:
        pytest.skip(
            f"no golden digests for this CPU ({cpu_key()}); `moe-runtime audit --golden write` adds them"
        )
    found = cpu_digests()
    assert set(expected) == set(found)
    assert compare_golden(expected, found) == []


def test_cpu_digests_repeat_and_name_op_shape_and_dtype():
    found = cpu_digests()
    assert found == cpu_digests()
    assert len(set(found.values())) == len(found) > 12
    assert all(name.split()[-1] in ("float32", "bfloat16", "float64") for name in found)


def test_a_digest_sees_bits_shape_and_dtype():
    x = torch.tensor([1.0, 0.0])
    seen = {digest([t]) for t in (x, torch.tensor([1.0, -0.0]), x[None], x.bfloat16(), x.int())}
    assert len(seen) == 5
    assert digest([x[None].t()]) == digest([x[None].t().contiguous()])


def test_writing_keeps_other_environments_and_names(tmp_path):
    write_golden("sm90", "sm90", {"a": "1", "b": "2"}, tmp_path)
    write_golden("sm90", "other", {"a": "9"}, tmp_path)
    path = write_golden("sm90", "sm90", {"b": "3", "c": "4"}, tmp_path)
    assert path.read_bytes().isascii()
    assert read_golden("sm90", "sm90", tmp_path) == {"a": "1", "b": "3", "c": "4"}
    assert read_golden("sm90", "other", tmp_path) == {"a": "9"}
    assert read_golden("sm90", "unknown", tmp_path) is None
    assert read_golden("sm80", "sm80", tmp_path) is None


def test_only_digests_that_moved_are_faults():
    assert compare_golden({"a": "1", "gone": "2"}, {"a": "1", "new": "3"}) == []
    assert compare_golden({"a": "1", "b": "2"}, {"a": "7", "b": "2"}) == ["a: 7 is not the committed 1"]
