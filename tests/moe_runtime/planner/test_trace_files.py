"""Traces: what each format means, and what is wrong with a file, by line, field, value and rule."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from moe_runtime.planner.trace import Stream
from moe_runtime.planner.trace_files import open_trace

SAMPLES = Path(__file__).parent / "traces"
MOONCAKE = {"timestamp": 5, "input_length": 600, "output_length": 3, "hash_ids": [4, 9]}
OWN = {"arrival_s": 1.5, "prompt_tokens": 10, "output_tokens": 2}
AZURE = "TIMESTAMP,ContextTokens,GeneratedTokens"


def trace_of(tmp_path, *lines):
    path = tmp_path / "trace"
    path.write_text("\n".join(line if isinstance(line, str) else json.dumps(line) for line in lines))
    return open_trace(path, 512)


def test_samples_of_the_public_traces():
    found = open_trace(SAMPLES / "mooncake_sample.jsonl", 151936)
    assert found.format == "mooncake"
    assert found.summary.num_requests == 40
    requests = list(found.requests())
    assert all(sum(s.num_tokens for s in r.streams) == r.num_prompt_tokens for r in requests)
    assert requests[0].streams[0] == requests[1].streams[0] == Stream(0, 512)
    found = open_trace(SAMPLES / "azure_2023_sample.csv", 151936)
    assert found.format == "azure"
    assert found.summary.num_requests == 40
    first, second, *_ = found.requests()
    assert (first.arrival, first.num_prompt_tokens, first.num_output_tokens) == (0, 374, 44)
    assert second.arrival == pytest.approx(4.314579)
    assert first.streams[0].number != second.streams[0].number


def test_times_of_mooncake_are_milliseconds(tmp_path):
    found = trace_of(tmp_path, MOONCAKE, MOONCAKE | {"timestamp": 1500})
    assert [r.arrival for r in found.requests()] == [0.005, 1.5]
    assert next(found.requests()).streams == (Stream(4, 512), Stream(9, 88))


def test_our_own_lines(tmp_path):
    found = trace_of(
        tmp_path,
        {"step": 0, "prompt_ids": [1, 2, 3], "output_tokens": 2},
        {"step": 4, "prompt_tokens": 9, "output_tokens": 2, "prefix": "p", "prefix_tokens": 8},
        {
            "step": 4,
            "prompt_tokens": 12,
            "output_tokens": 2,
            "prefix": "p",
            "prefix_tokens": 8,
            "session": "s",
        },
        "",
    )
    assert found.summary.by_step
    ids, prefix, session = found.requests()
    assert ids.prompt_ids(512) == (1, 2, 3)
    assert prefix.streams[0] == session.streams[0]
    assert prefix.prompt_ids(512)[8:] != session.prompt_ids(512)[8:9]
    assert (prefix.goes_on, session.goes_on) == (False, True)


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        ([], r"trace \S+ is empty; it must hold at least one request"),
        ([AZURE], r"has no request; it must hold at least one"),
        ([MOONCAKE, "", MOONCAKE], r"line 2: the line \(''\) must not be blank: the trace has a gap"),
        ([MOONCAKE, MOONCAKE | {"timestamp": 4}], r"line 2: timestamp \(0.004\) must not be before the line above's"),
        ([MOONCAKE | {"timestamp": -1}], r"line 1: timestamp \(-1\) must be finite and at least 0"),
        ([MOONCAKE | {"timestamp": float("nan")}], r"line 1: timestamp \(nan\) must be finite"),
        ([MOONCAKE | {"timestamp": True}], r"line 1: timestamp \(True\) must be finite"),
        ([MOONCAKE | {"timestamp": 10**400}], r"line 1: timestamp \(1000"),
        ([MOONCAKE | {"input_length": 0}], r"line 1: input_length \(0\) must be an integer in \[1, "),
        ([MOONCAKE | {"input_length": 6.5}], r"input_length \(6.5\) must be an integer"),
        ([MOONCAKE | {"hash_ids": [1]}], r"hash_ids \(1 of them\) must be a list of 2, one for each 512"),
        ([MOONCAKE | {"hash_ids": [1, -2]}], r"hash_ids \(-2\) must be integers in"),
        ([{"timestamp": 0, "input_length": 3}], r"line 1: hash_ids \(missing\) must be there"),
        ([MOONCAKE, OWN], r"line 2: input_length \(missing\) must be there"),
        ([OWN, "{"], r"line 2: \('\{'\) must be a JSON object"),
        (["{" * 9999], r"line 1: \('\{\{"),
        ([OWN, "[1]"], r"line 2: \('\[1\]'\) must be a JSON object"),
        ([OWN | {"arrival_s": float("inf")}], r"arrival_s \(inf\) must be finite"),
        ([OWN | {"arrivals": 1}], r"arrivals \(1\) must be one of"),
        ([OWN, {"step": 2, "prompt_tokens": 1, "output_tokens": 1}], r"line 2: step \(2\) must be arrival_s"),
        ([{"prompt_tokens": 1, "output_tokens": 1}], r"arrival_s or step \(missing\) must be given"),
        ([OWN | {"step": 1}], r"arrival_s or step \(arrival_s, step\) must be given, one of them"),
        ([OWN | {"prompt_ids": [1]}], r"prompt_tokens or prompt_ids \(prompt_tokens, prompt_ids\)"),
        ([OWN | {"prefix": "a"}], r"prefix_tokens \(missing\) must be there"),
        ([OWN | {"prefix_tokens": 3}], r"prefix \(missing\) must be there"),
        ([OWN | {"prefix": "a", "prefix_tokens": 11}], r"prefix_tokens \(11\) must be at most prompt_tokens \(10\)"),
        ([OWN | {"session": ""}], r"session \(\) must be a string of 1 to 256"),
        ([OWN | {"output_tokens": 0}], r"output_tokens \(0\) must be an integer in \[1, "),
        ([{"step": 1, "prompt_ids": [1, 512], "output_tokens": 1}], r"prompt_ids \(512\) must be token ids"),
        ([{"step": 1, "prompt_ids": [], "output_tokens": 1}], r"prompt_ids \(\[\]\) must be a list of at least one"),
        (["TIMESTAMP,ContextTokens", "1,2"], r"line 1: columns \('TIMESTAMP,ContextTokens'\) must be TIMESTAMP"),
        ([AZURE, "2023-11-16 18:15:46,3"], r"line 2: columns \(2\) must be 3, as the header's"),
        ([AZURE, "noon,3,4"], r"line 2: TIMESTAMP \(noon\) must be a time such as"),
        ([AZURE, "2023-11-16 18:15:46,3,NaN"], r"line 2: GeneratedTokens \(NaN\) must be an integer"),
        (
            [AZURE, "2023-11-16 18:15:46,3,4", "2023-11-16 18:15:45,3,4"],
            r"line 3: TIMESTAMP \(2023-11-16 18:15:45\) must not be before the first line's",
        ),
        ([AZURE, "2023-11-16 18:15:46,3,4", "2023-11-16 18:15:47+00:00,3,4"], r"line 3: TIMESTAMP"),
    ],
)  # fmt: skip
def test_what_is_wrong_is_said_once(tmp_path, lines, message):
    with pytest.raises(ValueError, match=message) as error:
        trace_of(tmp_path, *lines)
    assert "\n" not in str(error.value)


def test_files_that_cannot_be_read(tmp_path):
    with pytest.raises(ValueError, match=r"trace \S+none cannot be read: No such file"):
        open_trace(tmp_path / "none", 512)
    (tmp_path / "binary").write_bytes(b'{"step": 1, \xff')
    with pytest.raises(ValueError, match=r"trace \S+binary must be UTF-8 text"):
        open_trace(tmp_path / "binary", 512)
