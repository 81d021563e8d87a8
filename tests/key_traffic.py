"""Random traffic for an engine on a device of keys (key_runner.py), and what each of its requests gives alone."""

from __future__ import annotations

import random
import threading
from collections import Counter
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from moe_runtime.comm.groups import RankGroup
from moe_runtime.engine.block_manager import BlockManager
from moe_runtime.engine.engine import Engine
from moe_runtime.engine.grammar import GrammarMask
from moe_runtime.engine.messages import SequenceOutput
from moe_runtime.engine.request import Request, SamplingParams, choice_seed
from moe_runtime.engine.routed_experts import join_routed_experts, num_routed_tokens
from moe_runtime.engine.scheduler import Scheduler, SchedulerConfig
from moe_runtime.engine.sequence import UNKNOWN_TOKEN, Sequence
from moe_runtime.engine.sequence_grammar import SequenceGrammar
from moe_runtime.engine.sequence_rules import SequenceRules
from moe_runtime.engine.speculative import Proposer, Speculation
from moe_runtime.engine.structured_outputs import Grammar, StructuredOutputs
from moe_runtime.errors import InvalidRequestError
from moe_runtime.kernels.attention import BLOCK_SIZE
from moe_runtime.kernels.logit_rules import RowRules, leaves_a_token
from tests.key_runner import VOCAB, KeyRunner, chosen_after, keys_of, logprobs_of, next_key, routing_of

__all__ = ["EOS_ID", "Traffic", "alone", "drive", "run"]

EOS_ID = 0
TEXT = tuple(random.Random(7).choices(range(VOCAB), k=400))


class Form:
    """A stand-in for a compiled grammar: which tokens may follow is a function of its number and the tokens so far.

    Number by number: how long it is, whether it may go on at its end, whether a bound is reached on the way.
    """

    def __init__(self, number: int) -> None:
        self.number = number
        self.tokens: list[int] = []
        self.length = 1 + number % 23
        self.goes_on = number % 3 == 0
        self.bound = self.length // 2 if number % 11 == 5 else None

    def consume(self, token_id: int) -> None:
        if not self._allows(token_id):
            raise InvalidRequestError("not allowed")
        self.tokens.append(token_id)

    def rollback(self, num_tokens: int) -> None:
        del self.tokens[len(self.tokens) - num_tokens :]

    def mask(self) -> GrammarMask:
        if self.bound is not None and len(self.tokens) >= self.bound:
            raise InvalidRequestError("a bound was reached")
        bits = sum(1 << v for v in range(VOCAB) if self._allows(v))
        return GrammarMask(np.array([bits], dtype=np.uint32).view(np.int32), len(self.tokens) >= self.length)

    def _allows(self, token_id: int) -> bool:
        if token_id == EOS_ID or (len(self.tokens) >= self.length and not self.goes_on):
            return False
        return (
            hash((self.number, tuple(self.tokens[-3:]), token_id)) % 3 == 0 or token_id == 5 + self.number % 4
        )


class LateGrammars:
    """Grammars whose work is done at times that a random source decides, between any two calls of the engine."""

    def __init__(self, rng: random.Random) -> None:
        self.rng = rng
        self.work: list[Any] = []

    def open(self, grammar: Grammar, eos_token_ids) -> SequenceGrammar:
        opened = SequenceGrammar(
            lambda: Form(int(grammar.text)),
            eos_token_ids,
            VOCAB,
            compile_later=self.work.append,
            run_later=self.work.append,
            changed=threading.Condition(),
        )
        opened.start()
        return opened

    def wait(self, grammars, later=(), *, is_busy=False) -> None:
        self.do_some()

    def do_some(self, at_least: int = 0) -> None:
        for _ in range(max(at_least, self.rng.choice((0, 0, 1, 2, len(self.work))))):
            if self.work:
                self.work.pop(self.rng.randrange(len(self.work)))()


class LateScheduler(Scheduler):
    """Masks come in while it plans, too."""

    grammars: LateGrammars

    def schedule(self):
        self.grammars.do_some()
        return super().schedule()


class RandomProposer(Proposer):
    """Drafts that are right for a while, or not at all, in any number."""

    def __init__(self, answers: dict[tuple[str, int], list[int]], rng: random.Random) -> None:
        self.answers = answers
        self.rng = rng

    def propose(self, wanted):
        return [self._drafts(sequence, num) for sequence, num in wanted]

    def _drafts(self, sequence: Sequence, num: int) -> tuple[int, ...]:
        assert UNKNOWN_TOKEN not in sequence.token_ids
        first, rng = sequence.num_output_tokens, self.rng
        drafts = self.answers[sequence.request_id, sequence.choice_idx][first : first + num]
        drafts += [rng.randrange(VOCAB) for _ in range(rng.randint(0, num - len(drafts)))]
        if rng.random() < 0.5:
            num_right = rng.randrange(len(drafts) + 1)
            drafts[num_right:] = rng.choices(range(VOCAB), k=rng.randint(1, num))
        return tuple(drafts[:num])


@dataclass
class Traffic:
    num_blocks: int
    limits: SchedulerConfig
    overlaps: bool
    arrivals: list[tuple[int, Request]]
    aborts: list[tuple[int, str, int | None]] = field(default_factory=list)
    preemptions: list[tuple[int, str]] = field(default_factory=list)
    flushes: set[int] = field(default_factory=set)
    prefix_cache: bool = True
    most_drafts: int = 0
    paced: bool = False


def traffic(rng: random.Random) -> Traffic:
    is_plain = (
        rng.random() < 0.3
    )  # neither drafts nor grammars, which keep steps from overlapping; few blocks
    num_blocks = rng.randint(2, 4 if is_plain else 9)
    max_num_seqs = rng.randint(1, 5)
    arrivals, aborts, preemptions = [], [], []
    for number in range(rng.randint(2, 7)):
        name, most = str(number), num_blocks * BLOCK_SIZE - 1
        length = rng.choice((0, 1, 1, 2, 3)) * BLOCK_SIZE + rng.choice((-6, -4, -2, -1, 0, 0, 1, 9))
        prompt_ids = TEXT[: max(1, min(length, most))]
        if rng.random() < 0.3 and len(prompt_ids) < most:
            prompt_ids = (*prompt_ids, number)
        max_tokens = rng.randint(1, min(rng.choice((4, 30, 80)), num_blocks * BLOCK_SIZE - len(prompt_ids)))
        params = SamplingParams(
            temperature=rng.choice((0.0, 1.0)),
            seed=number,
            max_tokens=max_tokens,
            n=rng.choice((1, 1, 1, 2, 3)),
            ignore_eos=rng.random() < 0.5,
            logprobs=rng.choice((None, 0)),
            prompt_logprobs=rng.choice((None, None, 0)),
            return_routed_experts=rng.random() < 0.4,
            cache_prompt=rng.random() < 0.85,
        )
        grammar, ending_ids = None, ()
        kind = 0.6 + 0.4 * rng.random() if is_plain else rng.random()
        if kind < 0.12:
            params = replace(params, forced_token_ids=tuple(rng.choices(range(VOCAB), k=max_tokens)))
        elif kind < 0.17:
            params = replace(params, max_tokens=0, prompt_logprobs=0)
        elif kind < 0.55:
            grammar = Grammar(text=str(rng.randrange(1000)), compile_s=0.0)
            params = replace(params, structured_outputs=StructuredOutputs(regex="of the test"))
        if kind >= 0.17 and rng.random() < 0.3:
            params = replace(params, frequency_penalty=20.0, repetition_penalty=1.5, logit_bias={3: 9.0})
        if kind >= 0.17 and rng.random() < 0.2:
            params, ending_ids = replace(params, min_tokens=rng.randint(1, max_tokens)), (EOS_ID,)
        if kind >= 0.17 and rng.random() < 0.2:
            params = replace(params, stop_token_ids=tuple(rng.choices(range(VOCAB), k=2)))
        arrival = rng.randint(0, 3 if is_plain else 15)
        request = Request(
            request_id=name, prompt_ids=prompt_ids, params=params, grammar=grammar, ending_ids=ending_ids
        )
        arrivals.append((arrival, request))
        if rng.random() < 0.2:
            aborts.append((arrival + rng.randint(0, 30), name, rng.choice((None, 0, 1))))
        preemptions += [(arrival + rng.randint(1, 40), name) for _ in range(rng.choice((0, 0, 1, 2)))]
    return Traffic(
        num_blocks=num_blocks,
        limits=SchedulerConfig(
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=rng.randint(max_num_seqs, rng.choice((8, 99, 200))),
        ),
        overlaps=is_plain or rng.random() < 0.6,
        prefix_cache=rng.random() < 0.8,
        most_drafts=0 if is_plain else rng.choice((1, 3, 8, 8, 70)),
        paced=rng.random() < 0.3,
        arrivals=arrivals,
        aborts=aborts,
        preemptions=preemptions,
        flushes={rng.randint(0, 40) for _ in range(rng.choice((0, 0, 2)))},
    )


@dataclass
class Alone:
    """What a choice gives by itself, by plain decoding one token after another."""

    output_ids: list[int]
    finish_reason: str
    keys: list[int]


def alone(request: Request, choice_idx: int) -> Alone:
    params, ids = request.params, list(request.prompt_ids)
    keys, seed = keys_of(ids), choice_seed(params.seed, choice_idx)
    rules_of, num_prompt = SequenceRules.of(request), len(ids)
    form = None if request.grammar is None else Form(int(request.grammar.text))
    reason = "length"
    while (num_output := len(ids) - num_prompt) < params.max_tokens:
        if params.forced_token_ids is not None:
            token_id = params.forced_token_ids[num_output]
        else:
            rules = None if rules_of is None else rules_of.after(ids)
            if form is not None:
                try:
                    mask = form.mask()
                except InvalidRequestError:
                    reason = "error"
                    break
                words = mask.words.copy()
                if mask.may_end and not params.ignore_eos:
                    words[0] |= 1 << EOS_ID
                rules = replace(rules or RowRules(), allowed_mask=words)
                if not leaves_a_token(rules, ids[-1], VOCAB):
                    reason = "stop" if mask.may_end and num_output else "error"
                    break
            token_id = chosen_after(keys[-1], len(ids), params, seed, rules, ids[-1])
        ids.append(token_id)
        keys.append(next_key(keys[-1], token_id))
        may_stop = params.forced_token_ids is None and num_output + 1 > params.min_tokens
        is_end = (token_id == EOS_ID and not params.ignore_eos) or token_id in params.stop_token_ids
        if may_stop and is_end:
            reason = "stop"
            break
        if form is not None:
            form.consume(token_id)
    return Alone(ids[num_prompt:], reason, keys)


def drive(case: Traffic, rng: random.Random, blocks: type[BlockManager] = BlockManager) -> Engine:
    """Run the traffic to its end, looking at every step.

    Args:
        case: What comes when.
        rng: When grammars' work is done, and what drafts are.
        blocks: In place of the block manager.
    """
    expected = {(r.request_id, i): alone(r, i) for _, r in case.arrivals for i in range(r.params.n)}
    runner, grammars = KeyRunner(case.num_blocks, overlaps=case.overlaps), LateGrammars(rng)
    speculation = None
    if case.most_drafts:
        answers = {name: list(one.output_ids) for name, one in expected.items()}
        speculation = Speculation(RandomProposer(answers, rng), case.most_drafts, paced=case.paced)
    engine = Engine(
        runner,
        case.num_blocks,
        case.limits,
        RankGroup(),
        (EOS_ID,),
        prefix_cache=case.prefix_cache,
        speculation=speculation,
        grammars=grammars,  # type: ignore[arg-type]
    )
    engine.scheduler.blocks.__class__ = blocks
    engine.scheduler.__class__ = LateScheduler
    engine.scheduler.grammars = grammars  # type: ignore[attr-defined]
    outputs: dict[tuple[str, int], list[SequenceOutput]] = {name: [] for name in expected}
    aborted: set[tuple[str, int | None]] = set()
    total = sum(len(one.keys) for one in expected.values())
    times = [step for step, *_ in (*case.arrivals, *case.aborts, *case.preemptions)]
    last = max(*times, *case.flushes, 0)
    step = 0
    while step <= last or engine.scheduler.num_unfinished:
        for _, request in [a for a in case.arrivals if a[0] == step]:
            engine.add_request(request)
        for _, name in [p for p in case.preemptions if p[0] == step]:
            engine.preempt(name)
        for _, name, choice in [a for a in case.aborts if a[0] == step]:
            engine.abort(name, choice)
            aborted.add((name, choice))
        if step in case.flushes:
            (engine.flush.request if step % 2 else engine.flush.now)()
        for output in engine.step()[1]:
            outputs[output.request_id, output.choice_idx].append(output)
        assert engine.last_vector.num_tokens <= case.limits.max_num_batched_tokens
        check_blocks(engine)
        grammars.do_some(at_least=1)
        step += 1
        # Each step runs a token, or does a piece of work, or waits for a step under way.
        assert step <= last + 4 * total + 40, "the requests do not end"
    for output in engine.step()[1]:
        outputs[output.request_id, output.choice_idx].append(output)
    for (name, choice), one in expected.items():
        request = next(r for _, r in case.arrivals if r.request_id == name)
        is_whole = not aborted & {(name, None), (name, choice)}
        check_outputs(request, choice, one, outputs[name, choice], is_whole)
    for (sequence, position, key), count in runner.counted.items():
        assert count >= 0
        name = sequence.request_id, sequence.choice_idx
        assert count == 0 or expected[name].keys[position] == key, "a wrong draft is counted"
        num_output = sum(len(o.token_ids) for o in outputs[name])
        num_run = num_routed_tokens(sequence.num_prompt_tokens, num_output)
        assert count == 0 or position < num_run, "a row of a sequence that had ended is counted"
    num_wrong = 0
    if speculation is not None:
        drafts = speculation.stats()
        num_wrong = drafts.num_draft_tokens - drafts.num_accepted_tokens
    assert engine.num_computed_tokens - num_wrong == sum(runner.counted.values())
    counts = sum(len(o.token_ids) for parts in outputs.values() for o in parts)
    assert engine.num_generation_tokens == counts
    assert engine.scheduler.blocks.num_free_blocks == case.num_blocks
    assert engine.scheduler.blocks.num_flushes == len(case.flushes)
    return engine


def check_blocks(engine: Engine) -> None:
    scheduler = engine.scheduler
    holders = Counter(block for s in scheduler.running for block in s.block_ids)
    assert len(holders) + scheduler.blocks.num_free_blocks == scheduler.blocks.num_blocks, "a block is lost"
    assert not any(s.block_ids for s in scheduler.waiting)
    under_way = engine._under_way
    drafts = {id(c.sequence): len(c.draft_ids) for c in under_way.chunks} if under_way else {}
    for s in scheduler.running:
        most = scheduler.blocks.num_blocks_for(s.num_tokens + drafts.get(id(s), 0))
        assert len(s.block_ids) <= most, "drafts have left blocks behind"
        assert UNKNOWN_TOKEN not in s.token_ids[:-1]
        assert len(set(s.block_ids)) == len(s.block_ids)
        if not s.params.cache_prompt:
            assert all(holders[block] == 1 for block in s.block_ids), "an opted-out request shares a block"


def check_outputs(request, choice: int, one: Alone, outputs: list[SequenceOutput], is_whole: bool) -> None:
    params, num_prompt = request.params, len(request.prompt_ids)
    found = [token_id for o in outputs for token_id in o.token_ids]
    assert found == one.output_ids[: None if is_whole else len(found)], (request.request_id, choice)
    if is_whole:
        assert [o.finish_reason for o in outputs if o.finish_reason is not None] == [one.finish_reason]
        assert outputs[-1].finish_reason is not None
    if not found:
        return
    logprobs = [entry for o in outputs for entry in o.logprobs or ()]
    wanted = [logprobs_of(key, t) for key, t in zip(one.keys[num_prompt - 1 :], found, strict=False)]
    assert logprobs == ([] if params.logprobs is None else wanted)
    if params.prompt_logprobs is not None and choice == 0:
        entries = [entry for o in outputs if o.prompt_logprobs is not None for entry in o.prompt_logprobs]
        scored = zip(one.keys, request.prompt_ids[1:], strict=False)
        assert entries == [None, *(logprobs_of(key, token_id) for key, token_id in scored)]
    if params.return_routed_experts:
        num_routed = num_routed_tokens(num_prompt, len(found))
        routed = join_routed_experts([o.routed_experts for o in outputs if o.routed_experts is not None])
        assert routed.first(num_routed) == routing_of(one.keys[:num_routed])
    assert outputs[0].num_cached_tokens < (num_prompt if params.cache_prompt else 1)


def run(seed: int) -> Engine:
    """Traffic of a seed, to its end; raises AssertionError where a request gives something else than alone."""
    return drive(traffic(random.Random(seed)), random.Random(seed))
