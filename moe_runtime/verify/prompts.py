"""The requests of the check: a function of seed, vocabulary and context length, never of the number of ranks."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, replace

from moe_runtime.engine.request import SamplingParams
from moe_runtime.engine.structured_outputs import StructuredOutputs

__all__ = ["NUM_TOP_LOGPROBS", "Case", "PromptSource"]

NUM_TOP_LOGPROBS = 5
MIXED_NUM_SHORT = 8
MIXED_NUM_LONG = 4
BUCKET_PROMPT_TOKENS = 3
CACHED_TAIL_TOKENS = 20
REPETITIVE_PHRASE_TOKENS = 5
STRUCTURED_PROMPT_TOKENS = (62, 126, 3, 61)
STRUCTURED_FORMS = {
    "regex": StructuredOutputs(regex="([a-f]{1,7}[0-9]{2,5} ){4,}"),
    "grammar": StructuredOutputs(grammar='start: item+\nitem: WORD | "(" start ")"\nWORD: /[g-m]{1,9} /'),
    "choice": StructuredOutputs(choice=("nope", "not a word of it", "yes")),
    "schema": StructuredOutputs(
        json={
            "type": "array",
            "minItems": 9,
            "items": {
                "type": "object",
                "properties": {"name": {"type": "string", "maxLength": 12}, "size": {"type": "integer"}},
                "required": ["name", "size"],
                "additionalProperties": False,
            },
        }
    ),
}
PREFIX_EDGES = (1, 63, 64, 65, 128, 255, 256, 257)


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """A request. Requests of one name must give the same bits, as far as their outputs reach.

    Attributes:
        name: Says prompt and sampling.
        prompt_ids: The prompt.
        params: Sampling; the output always has ``max_tokens`` or as many tokens as are forced.
        num_scored: Nonzero: the last ``num_scored`` prompt tokens are an output to be scored as part of a prompt.
    """

    name: str
    prompt_ids: tuple[int, ...]
    params: SamplingParams
    num_scored: int = 0

    @property
    def num_output_tokens(self) -> int:
        """Tokens of the output that is compared."""
        return self.num_scored or self.params.max_tokens or 0

    @property
    def is_forced(self) -> bool:
        """The output's tokens are given, not chosen."""
        return self.num_scored > 0 or self.params.forced_token_ids is not None

    def shortened(self, max_tokens: int) -> Case:
        """The same request with at most ``max_tokens`` tokens of output; one that is scored stays as it is."""
        if self.num_scored:
            return self
        return replace(
            self,
            params=replace(self.params, max_tokens=min(max_tokens, self.params.max_tokens or max_tokens)),
        )

    def ruled(self) -> Case:
        """The same request with rules for its logits, which depend on the prompt and the output so far."""
        params = replace(
            self.params,
            repetition_penalty=1.3,
            frequency_penalty=0.5,
            presence_penalty=0.25,
            logit_bias={self.prompt_ids[0]: 2.0},
        )
        return replace(self, name=f"{self.name} ruled", params=params)

    def salted(self, salt: str) -> Case:
        """The same request of another tenant of the prefix cache."""
        return replace(self, params=replace(self.params, cache_salt=salt))

    def uncached(self) -> Case:
        """The same request with all of it computed, and nothing left for others."""
        return replace(self, params=replace(self.params, cache_prompt=False))

    def forced(self, token_ids: Sequence[int]) -> Case:
        """The same request made to output ``token_ids``; one that is scored stays as it is."""
        if self.num_scored:
            return self
        params = replace(
            self.params,
            max_tokens=len(token_ids),
            forced_token_ids=tuple(token_ids),
            structured_outputs=None,
        )
        return replace(self, params=params)

    def scored(self, token_ids: Sequence[int]) -> Case:
        """A request that scores ``token_ids`` after the prompt, and generates nothing."""
        params = replace(
            self.params,
            max_tokens=0,
            logprobs=None,
            prompt_logprobs=NUM_TOP_LOGPROBS,
            structured_outputs=None,
        )
        prompt_ids = (*self.prompt_ids, *token_ids)
        return replace(self, prompt_ids=prompt_ids, params=params, num_scored=len(token_ids))


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptSource:
    """Makes all requests of a check.

    Attributes:
        seed: Decides everything together with the fields below.
        vocab_size: Ids are drawn from ``[0, vocab_size)``.
        context: Most tokens of prompt and output together.
        max_tokens: Output tokens of a request.
    """

    seed: int
    vocab_size: int
    context: int
    max_tokens: int

    def random_cases(self, num_prompts: int, *, both: bool = False) -> list[Case]:
        """Random prompts, lengths normal around a quarter of the context with a deviation of a tenth, clipped.

        Args:
            num_prompts: How many.
            both: Each prompt greedy and seeded; else they take turns, even ones greedy.
        """
        cases = []
        for i in range(num_prompts):
            rng = self._rng(f"prompt {i}")
            num_tokens = self._clip(round(rng.normalvariate(self.context / 4, self.context / 10)))
            variants = self._variants(f"prompt {i}", self._ids(rng, num_tokens))
            cases += variants if both else [variants[i % 2]]
        return cases

    def single_cases(self) -> list[Case]:
        """One prompt, an eighth of the context long, greedy and seeded."""
        return self._variants("single", self._ids(self._rng("single"), self._clip(self.context // 8)))

    def mixed_cases(self) -> list[Case]:
        """Prompts of a few tokens, and prompts of half to three quarters of the context; every other pair of them with
        penalties and a bias.
        """
        rng = self._rng("mixed")
        lengths = [(f"short {i}", rng.randint(1, 8)) for i in range(MIXED_NUM_SHORT)]
        for i in range(MIXED_NUM_LONG):
            lengths.append((f"long {i}", rng.randint(self.context // 2, 3 * self.context // 4)))
        cases = [
            self._variants(name, self._ids(rng, self._clip(length)))[i % 2]
            for i, (name, length) in enumerate(lengths)
        ]
        return [case.ruled() if i % 4 >= 2 else case for i, case in enumerate(cases)]

    def prefix_cases(self) -> list[Case]:
        """Prefixes of one text, half the context long: around block and chunk boundaries, and at random."""
        rng = self._rng("prefix")
        text = self._ids(rng, self._clip(self.context // 2))
        lengths = {n for n in PREFIX_EDGES if n < len(text)} | {len(text)}
        lengths |= {rng.randint(1, len(text)) for _ in range(4)}
        return [
            self._variants(f"prefix of {length}", text[:length])[i % 2]
            for i, length in enumerate(sorted(lengths))
        ]

    def cached_cases(self, block_size: int) -> list[Case]:
        """Prompts that begin alike, one token less than some blocks, as many and one more: by themselves, before
        different ends, and scored; and some of as many tokens that begin otherwise.

        Args:
            block_size: Tokens of a KV block.
        """
        rng = self._rng("cached")
        texts = [self._ids(rng, self._clip(4 * block_size + 2)) for _ in range(2)]
        edges = [blocks * block_size + by for blocks in (1, 2, 4) for by in (-1, 0, 1)]
        edges = [length for length in edges if length < len(texts[0])] or [len(texts[0])]
        middle = edges[3:6] or edges[-1:]
        prompts = [(f"cached {length}", texts[0][:length]) for length in edges]
        prompts += [(f"other cached {length}", texts[1][:length]) for length in (edges[-1], edges[0])]
        tail = self._clip(len(texts[0]) + CACHED_TAIL_TOKENS) - len(texts[0])
        prompts += [
            (f"cached {length} and on", texts[0][:length] + self._ids(rng, tail)) for length in middle
        ]
        cases = [self._variants(name, prompt_ids)[i % 2] for i, (name, prompt_ids) in enumerate(prompts)]
        scored = [case for case in cases if 1 < len(case.prompt_ids) in middle and "on" not in case.name]
        return [
            *cases,
            *(
                replace(case, name=f"{case.name}, scored", prompt_ids=case.prompt_ids[:1]).scored(
                    case.prompt_ids[1:]
                )
                for case in scored
            ),
        ]

    def repetitive_cases(self) -> list[Case]:
        """A few tokens over and over, an eighth of the context long, greedy and seeded, plain and with rules."""
        rng = self._rng("repetitive")
        num_tokens = self._clip(self.context // 8)
        phrase = self._ids(rng, REPETITIVE_PHRASE_TOKENS)
        plain = self._variants("repetitive", (phrase * num_tokens)[:num_tokens])
        return [*plain, plain[1].ruled()]

    def bucket_cases(self, count: int) -> list[Case]:
        """``count`` prompts of a few tokens, greedy and seeded in turn."""
        rng = self._rng("buckets")
        num_tokens = self._clip(BUCKET_PROMPT_TOKENS)
        return [self._variants(f"bucket {i}", self._ids(rng, num_tokens))[i % 2] for i in range(count)]

    def structured_cases(self) -> list[Case]:
        """Prompts whose outputs have a form, one of each, greedy and seeded; the seeded ones have penalties too."""
        rng = self._rng("structured")
        cases = []
        for (form, wanted), length in zip(STRUCTURED_FORMS.items(), STRUCTURED_PROMPT_TOKENS, strict=True):
            greedy, seeded = (
                replace(case, params=replace(case.params, structured_outputs=wanted))
                for case in self._variants(form, self._ids(rng, self._clip(length)))
            )
            cases += [greedy, seeded.ruled()]
        return cases

    def shuffle(self, what: str, cases: Sequence[Case]) -> list[Case]:
        """``cases`` in another order, which depends on seed and ``what``."""
        order = list(cases)
        self._rng(f"shuffle {what}").shuffle(order)
        return order

    def integers(self, what: str, count: int, limit: int) -> list[int]:
        """``count`` integers in ``[0, limit)``, which depend on seed and ``what``."""
        rng = self._rng(f"integers {what}")
        return [rng.randrange(limit) for _ in range(count)]

    def _rng(self, what: str) -> random.Random:
        # Seeding with a string goes through SHA-512: the same stream in every process.
        return random.Random(f"{self.seed} {what}")

    def _clip(self, num_tokens: int) -> int:
        return max(1, min(num_tokens, self.context - self.max_tokens))

    def _ids(self, rng: random.Random, num_tokens: int) -> tuple[int, ...]:
        return tuple(rng.randrange(self.vocab_size) for _ in range(num_tokens))

    def _variants(self, name: str, prompt_ids: tuple[int, ...]) -> list[Case]:
        greedy = SamplingParams(
            temperature=0.0, seed=0, max_tokens=self.max_tokens, ignore_eos=True, logprobs=NUM_TOP_LOGPROBS
        )
        seed = self._rng(f"seed of {name}").randrange(2**63)
        seeded = replace(greedy, temperature=0.8, top_p=0.95, seed=seed)
        return [
            Case(name=f"{name} greedy", prompt_ids=prompt_ids, params=greedy),
            Case(name=f"{name} seeded", prompt_ids=prompt_ids, params=seeded),
        ]
