"""From outputs of ranks to text, ends and usage."""

from __future__ import annotations

import asyncio

import pytest

from moe_runtime.engine.messages import SequenceOutput, TokenLogprobs
from moe_runtime.engine.request import SamplingParams, make_request
from moe_runtime.server.admission import Admission
from moe_runtime.server.context import Context
from moe_runtime.server.errors import ApiError
from moe_runtime.server.generation import Generation, merge_deltas
from moe_runtime.server.metrics import Metrics
from tests.moe_runtime.server.fake_rank import EOS_ID, LIMITS, byte_ids


class StubClient:
    """Keeps what it is asked to do."""

    def __init__(self, config):
        self.mailbox, self.aborts = None, []
        self.open, self.admission = set(), Admission(config, {})

    def submit(self, request, mailbox, request_idx):
        self.mailbox = mailbox
        self.open.add(request.request_id)

    def is_open(self, request_id):
        return request_id in self.open

    def abort(self, request_id, choice_idx=None):
        if choice_idx is None:
            self.open.discard(request_id)
        self.aborts.append((request_id, choice_idx))


@pytest.fixture
def generate(tokenizer, make_config):
    """``generate(params, batches)``: all deltas of one request, given batches of outputs, and the client."""

    def run(params, batches, *, config=None):
        config = config or make_config()
        client = StubClient(config)
        defaults = {"temperature": 1.0, "top_p": 1.0, "top_k": 0, "min_p": 0.0}
        context = Context(
            config=config,
            client=client,
            tokenizer=tokenizer,
            metrics=Metrics(config, {}),
            sampling_defaults=defaults,
        )
        client.metrics = context.metrics
        request = make_request("r", byte_ids("Hi"), SamplingParams(seed=1, **params), LIMITS)

        async def collect():
            deltas = []
            with Generation(context, [request]) as generation:
                for batch in batches:
                    for output in batch:
                        client.mailbox.put(0, output)
                    deltas += await generation.next_deltas()
                return deltas, generation.num_completion_tokens, generation.is_finished

        return *asyncio.run(collect()), client

    return run


def outputs(ids, *, finish_reason=None, step=1, choice_idx=0, stop_reason=None):
    result = [SequenceOutput("r", choice_idx, tuple(ids[i : i + step])) for i in range(0, len(ids), step)]
    last = result[-1]
    result[-1] = SequenceOutput("r", choice_idx, last.token_ids, None, None, finish_reason, stop_reason)
    return result


@pytest.mark.parametrize("split", [1, 2, 5, 100])
def test_a_stop_string_over_several_tokens_cuts_text_tokens_and_usage(generate, split):
    ids = byte_ids("one two three four")
    batches = [[output] for output in outputs(ids, step=split, finish_reason="length")]
    met = []

    def until_stop():
        for batch in batches:
            if met:
                return
            yield batch

    deltas, num_tokens, is_finished, client = generate(
        {"stop": ("o th", "never"), "max_tokens": 50}, _stop_when(until_stop(), ids, split, met)
    )
    whole = merge_deltas(deltas)
    assert whole.text == "one tw"
    assert (whole.finish_reason, whole.stop_reason) == ("stop", "o th")
    assert list(whole.token_ids) == ids[:10]
    assert num_tokens == 10
    assert is_finished
    assert client.aborts[0] == ("r", 0)


def _stop_when(batches, ids, split, met):
    """Yield batches up to the one that holds the tenth token."""
    seen = 0
    for batch in batches:
        yield batch
        seen += split
        if seen >= 10:
            met.append(True)


def test_text_held_back_for_a_stop_string_comes_at_the_end(generate):
    deltas, num_tokens, _, _ = generate(
        {"stop": ("xyz",), "max_tokens": 9}, [[o] for o in outputs(byte_ids("ab xy"), finish_reason="length")]
    )
    assert [delta.text for delta in deltas] == ["a", "b", " ", "", "xy"]
    assert merge_deltas(deltas).finish_reason == "length"
    assert num_tokens == 5


def test_an_end_of_sequence_token_counts_but_has_no_text(generate):
    ids = [*byte_ids("ab"), EOS_ID]
    for skip in (True, False):
        deltas, num_tokens, _, _ = generate(
            {"max_tokens": 9, "skip_special_tokens": skip}, [outputs(ids, finish_reason="stop", step=3)]
        )
        assert (deltas[0].text, deltas[0].stop_reason, num_tokens) == ("ab", None, 3)


def test_outputs_wait_for_the_prompt_logprobs(generate):
    entries = (None, TokenLogprobs(-1.0))
    second = outputs(byte_ids("yy"), finish_reason="length", choice_idx=1, step=2)
    first = SequenceOutput("r", 0, tuple(byte_ids("x")), None, entries, "length")
    params = {"prompt_logprobs": 0, "n": 2, "max_tokens": 2}
    deltas, _, is_finished, _ = generate(params, [second, [first]])
    assert [(d.choice_idx, d.text, d.prompt_logprobs) for d in deltas] == [
        (1, "yy", entries),
        (0, "x", entries),
    ]
    assert is_finished


def test_leaving_aborts_the_request(generate):
    *_, client = generate({"max_tokens": 9}, [outputs(byte_ids("a"))])
    assert client.aborts == [("r", None)]


def test_a_request_that_the_engine_drops_is_a_503(generate):
    with pytest.raises(ApiError) as raised:
        generate({"max_tokens": 9}, [[SequenceOutput("r", 0, finish_reason="abort")]])
    assert raised.value.status == 503


def test_a_call_that_takes_too_long_is_a_504(generate, make_config):
    with pytest.raises(ApiError) as raised:
        generate({"max_tokens": 9}, [[]], config=make_config(request_timeout_s=0.05))
    assert (raised.value.status, raised.value.code) == (504, "request_timeout")


def test_what_is_past_a_stop_string_is_in_no_metric(generate):
    """Tokens of one wait: ten up to the stop string, eight past it."""
    ids = byte_ids("one two three four")
    *_, client = generate({"stop": ("o th",), "max_tokens": 50}, [outputs(ids, finish_reason="length")])
    text = client.metrics.exposition().decode()
    for line in (
        "moe_runtime_prompt_tokens_total 2.0",
        "moe_runtime_generation_tokens_total 10.0",
        'moe_runtime_request_success_total{finished_reason="stop"} 1.0',
        'moe_runtime_request_success_total{finished_reason="length"} 0.0',
        'moe_runtime_request_success_total{finished_reason="abort"} 0.0',
        "moe_runtime_time_to_first_token_seconds_count 1.0",
        "moe_runtime_inter_token_latency_seconds_count 9.0",
        "moe_runtime_e2e_request_latency_seconds_count 1.0",
    ):
        assert f"\n{line}\n" in text


def test_a_sequence_that_is_left_is_an_abort_in_the_metrics(generate):
    *_, client = generate({"max_tokens": 9, "n": 2}, [outputs(byte_ids("a"))])
    text = client.metrics.exposition().decode()
    assert 'request_success_total{finished_reason="abort"} 2.0' in text
    assert "moe_runtime_prompt_tokens_total 2.0" in text


def run_with_a_blocked_handler(tokenizer, make_config, act, **config):
    """``act(client)`` once a handler has taken a first token and stays busy with its reader."""

    async def run():
        settings = make_config(**config)
        client = StubClient(settings)
        defaults = {"temperature": 1.0, "top_p": 1.0, "top_k": 0, "min_p": 0.0}
        metrics = Metrics(settings, {})
        context = Context(
            config=settings, client=client, tokenizer=tokenizer, metrics=metrics, sampling_defaults=defaults
        )
        request = make_request("r", byte_ids("Hi"), SamplingParams(seed=1, max_tokens=50), LIMITS)
        with Generation(context, [request]) as generation:
            client.mailbox.put(0, outputs(byte_ids("a"))[0])
            await generation.next_deltas()
            await act(client)
            aborted = list(client.aborts)
            try:
                await generation.next_deltas()
            except ApiError as error:
                return error, aborted, metrics.exposition().decode()
        return None, aborted, metrics.exposition().decode()

    return asyncio.run(run())


async def _until_closed(client):
    async with asyncio.timeout(20):
        while client.open:
            await asyncio.sleep(0.005)


def test_a_call_whose_time_is_over_frees_its_blocks_though_its_reader_blocks(tokenizer, make_config):
    error, aborted, text = run_with_a_blocked_handler(
        tokenizer, make_config, _until_closed, request_timeout_s=0.05
    )
    assert (error.status, error.code) == (504, "request_timeout")
    assert aborted == [("r", None)]
    assert 'requests_cut_short_total{reason="request_timeout"} 1.0' in text
    assert 'request_success_total{finished_reason="abort"} 1.0' in text


def test_a_call_that_has_been_generated_is_not_too_late(tokenizer, make_config):
    async def finish(client):
        client.mailbox.put(0, outputs(byte_ids("b"), finish_reason="length")[0])
        client.open.clear()
        await asyncio.sleep(0.1)

    error, aborted, text = run_with_a_blocked_handler(tokenizer, make_config, finish, request_timeout_s=0.05)
    assert (error, aborted) == (None, [])
    assert 'requests_cut_short_total{reason="request_timeout"} 0.0' in text


def test_more_than_may_wait_for_a_reader_ends_the_call(tokenizer, make_config):
    async def flood(client):
        for _ in range(9):
            client.mailbox.put(0, outputs(byte_ids("b"))[0])

    error, aborted, text = run_with_a_blocked_handler(tokenizer, make_config, flood, max_unread_bytes=1000)
    assert (error.status, error.code) == (408, "slow_reader")
    assert aborted == [("r", None)]
    assert 'requests_cut_short_total{reason="slow_reader"} 1.0' in text
    error, aborted, _ = run_with_a_blocked_handler(tokenizer, make_config, flood, max_unread_bytes=2000)
    assert (error, aborted) == (None, []), "the control, within the bound"


@pytest.mark.parametrize("prompt_logprobs", [None, 0])
def test_masks_that_leave_no_token_are_the_requests_error(generate, prompt_logprobs):
    """Told at once, though the prompt's logprobs have not come, which others wait for."""
    reason = "structured_outputs leaves no token to choose"
    output = SequenceOutput("r", 0, finish_reason="error", error=reason)
    with pytest.raises(ApiError, match=reason) as raised:
        generate({"max_tokens": 4, "prompt_logprobs": prompt_logprobs}, [[output]])
    assert (raised.value.status, raised.value.code) == (400, "no_token_left")


def test_an_output_may_end_without_another_token(generate):
    ids = byte_ids("ab")
    ended = SequenceOutput("r", 0, finish_reason="stop")
    deltas, num_tokens, is_finished, _ = generate({"max_tokens": 9}, [outputs(ids), [ended]])
    whole = merge_deltas(deltas)
    assert (whole.text, whole.finish_reason, whole.stop_reason) == ("ab", "stop", None)
    assert (num_tokens, is_finished) == (2, True)
