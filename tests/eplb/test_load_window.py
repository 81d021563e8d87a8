"""Load window: exact sums of the newest steps, bounded memory, files say what is wrong with them."""

from __future__ import annotations

import io
import pickle

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from moe_runtime.eplb.load_window import NUM_BUCKETS, LoadWindow
from moe_runtime.eplb.placement import contiguous_model_placement
from moe_runtime.eplb.policy import plan_placement


def steps_of(num_steps, seed=0):
    return np.random.default_rng(seed).integers(0, 50, (num_steps, 2, 6))


@settings(max_examples=60, deadline=None, derandomize=True)
@given(st.integers(1, 5), st.integers(1, 4), st.lists(st.integers(1, 4), max_size=40))
def test_the_window_holds_the_newest_buckets_and_nothing_else(num_buckets, per_bucket, groups):
    """Against a plain list of buckets."""
    window = LoadWindow(2, 6, num_steps=num_buckets * per_bucket, steps_per_bucket=per_bucket)
    size = window.num_bytes
    buckets: list[list] = []
    for i, group in enumerate(groups):
        group = min(group, per_bucket)
        counts = steps_of(1, i)[0]
        window.add(counts, group)
        if not buckets or buckets[-1][0] + group > per_bucket:
            buckets.append([0, np.zeros((2, 6), dtype=np.int64)])
        buckets[-1][0] += group
        buckets[-1][1] = buckets[-1][1] + counts
    newest = buckets[-num_buckets:]
    assert window.bucket_steps().tolist() == [steps for steps, _ in newest]
    assert [b.tolist() for b in window.buckets()] == [counts.tolist() for _, counts in newest]
    assert window.totals().tolist() == sum((c for _, c in newest), np.zeros((2, 6), dtype=np.int64)).tolist()
    assert window.num_held_steps == sum(steps for steps, _ in newest)
    assert window.num_seen_steps == sum(min(g, per_bucket) for g in groups)
    assert window.num_bytes == size == num_buckets * 2 * 6 * 8


@pytest.mark.parametrize("num_steps", [0, 1, 5, 23])
def test_a_file_gives_the_window_back(tmp_path, num_steps):
    window = LoadWindow(2, 6, num_steps=6, steps_per_bucket=2)
    for step in steps_of(num_steps) * 300:
        window.add(step)
    path = tmp_path / "window.npz"
    window.save(path)
    assert path.read_bytes() == window.dump()
    again = LoadWindow.load(path)
    for window_ in (window, again):
        window_.add(steps_of(1, 99)[0])
    assert (again.buckets() == window.buckets()).all()
    assert again.bucket_steps().tolist() == window.bucket_steps().tolist()
    assert again.num_seen_steps == window.num_seen_steps == num_steps + 1


def test_a_full_size_window_is_compact(tmp_path):
    window = LoadWindow(58, 256, num_steps=1024, steps_per_bucket=64)
    assert window.num_bytes == 16 * 58 * 256 * 8
    rng = np.random.default_rng(0)
    for _ in range(16):
        window.add(rng.multinomial(4096, np.full(256, 1 / 256), size=58), 64)
    assert len(window.dump()) < 16 * 58 * 256 * 1.2


def file_of(tmp_path, **changes):
    window = LoadWindow(2, 6, num_steps=4)
    for step in steps_of(3):
        window.add(step)
    with np.load(io.BytesIO(window.dump())) as archive:
        fields = {name: archive[name] for name in archive.files}
    fields.update(changes)
    path = tmp_path / "w.npz"
    np.savez(path, **{name: value for name, value in fields.items() if value is not None})
    return path


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"format": np.array("other")}, r"format \('other'\) must be"),
        ({"counts": None}, "counts is missing"),
        ({"config": np.array([2, 6])}, "config .* must be five integers"),
        ({"config": np.array([2, 6, 0, 1, 3])}, r"num_steps \(0\)"),
        ({"config": np.array([2, 7, 4, 1, 3])}, "7 experts"),
        ({"config": np.array([2, 6, 2, 1, 3])}, "at most 2 buckets"),
        ({"config": np.array([2, 6, 4, 1, 2])}, r"steps seen \(2\)"),
        ({"steps": np.array([1, 2, 1])}, r"steps \(\[1, 2, 1\]\) must be in \[1, 1\]"),
        ({"counts": np.full((3, 2, 6), -1)}, r"counts of bucket 0, layer 0, expert 0 \(-1\)"),
        ({"counts": np.full((3, 2, 6), np.nan)}, r"\(nan\) must be an integer"),
    ],
)
def test_a_broken_file_is_refused_with_its_name(tmp_path, changes, message):
    with pytest.raises(ValueError, match=rf"{message}"):
        LoadWindow.load(file_of(tmp_path, **changes))


@pytest.mark.parametrize("content", [b"", b"not a zip", pickle.dumps([1, 2]), b"\x93NUMPY\x01\x00"])
def test_what_is_no_archive_is_refused(tmp_path, content):
    path = tmp_path / "bad.npz"
    path.write_bytes(content)
    with pytest.raises(ValueError, match=r"load window file .*bad\.npz cannot be read"):
        LoadWindow.load(path)
    with pytest.raises(ValueError, match=r"none\.npz cannot be read"):
        LoadWindow.load(tmp_path / "none.npz")


def test_objects_in_an_archive_are_never_unpickled(tmp_path):
    path = tmp_path / "bad.npz"
    np.savez(path, format=np.array([object()], dtype=object))
    with pytest.raises(ValueError, match="cannot be read"):
        LoadWindow.load(path)


def test_balance_and_hottest_expert_of_what_is_held():
    window = LoadWindow(2, 4, num_steps=2)
    placement = contiguous_model_placement(2, 4, 2)
    assert window.balance(placement).overall == 1.0
    assert window.balance(placement, by_bucket=True).overall == 1.0
    window.add(np.array([[1000] * 4, [1000] * 4]))
    window.add(np.array([[4, 0, 0, 0], [1, 1, 1, 1]]))
    window.add(np.array([[0, 0, 4, 0], [1, 1, 1, 1]]))
    assert window.balance(placement).per_layer.tolist() == [1.0, 1.0]
    assert window.balance(placement, by_bucket=True).per_layer.tolist() == [0.5, 1.0]
    hottest = window.hottest_expert()
    assert (hottest.layer_idx, hottest.expert_idx, hottest.num_tokens, hottest.share) == (0, 0, 4, 0.5)


def test_a_copy_is_the_same_and_stays():
    window = LoadWindow(2, 6, num_steps=6, steps_per_bucket=2)
    for step in steps_of(9):
        window.add(step)
    same = window.copy()
    assert same.dump() == window.dump()
    for one in (window, same):
        one.add(steps_of(1)[0])
    assert same.dump() == window.dump()
    window.add(steps_of(1)[0])
    assert same.dump() != window.dump()


@pytest.mark.parametrize(("num_steps", "per_bucket"), [(1, 1), (16, 1), (32, 2), (1024, 64)])
def test_windows_by_length_have_few_buckets(num_steps, per_bucket):
    window = LoadWindow.of_steps(2, 6, num_steps)
    assert (window.num_steps, window.steps_per_bucket) == (num_steps, per_bucket)
    assert window.num_buckets <= NUM_BUCKETS


def test_a_window_is_what_a_planner_takes():
    window = LoadWindow(2, 6, num_steps=4)
    for step in steps_of(4):
        window.add(step)
    assert plan_placement(window.buckets(), (2, 2, 2), objective="steps").num_layers == 2


@pytest.mark.parametrize(
    ("counts", "num_steps", "message"),
    [
        (np.ones((2, 5)), 1, r"counts \(shape \(2, 5\)\) must be \(2, 6\)"),
        (np.ones((3, 2, 6)), 1, r"must be \(2, 6\)"),
        (-np.ones((2, 6)), 1, "must be an integer number"),
        (np.full((2, 6), np.nan), 1, "must be an integer number"),
        (np.ones((2, 6)), 0, r"num_steps \(0\) must be in \[1, steps_per_bucket \(2\)\]"),
        (np.ones((2, 6)), 3, r"num_steps \(3\)"),
    ],
)
def test_counts_that_do_not_fit_are_refused_and_change_nothing(counts, num_steps, message):
    window = LoadWindow(2, 6, num_steps=4, steps_per_bucket=2)
    with pytest.raises(ValueError, match=message):
        window.add(counts, num_steps)
    assert (window.num_seen_steps, window.totals().sum()) == (0, 0)


@pytest.mark.parametrize(
    "form",
    [{"num_steps": 0}, {"num_steps": 5, "steps_per_bucket": 2}, {"num_steps": 4, "steps_per_bucket": 0}],
)
def test_impossible_windows_are_refused(form):
    with pytest.raises(ValueError, match=r"num_steps|steps_per_bucket"):
        LoadWindow(2, 6, **form)
