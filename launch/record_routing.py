"""``python -m moe_runtime.record_routing``: a file of prompts in, a log of the experts that their tokens went to out.

Under torchrun every rank reads the input and rank 0 writes the log, in the order of the lines and of their choices. The
log is the same for any batch, number of ranks and placement of experts.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from moe_runtime.comm.groups import RankGroup
from moe_runtime.config import RecordRoutingConfig
from moe_runtime.engine.llm import LLM
from moe_runtime.eplb.routing_log import RoutingLogHeader, RoutingLogWriter
from moe_runtime.launch.cli import parse_config
from moe_runtime.launch.generate import open_output, parse_line, prompt_of, read_lines, run_offline
from moe_runtime.launch.progress import progress_bar

__all__ = ["main"]

logger = logging.getLogger(__name__)

_Parsed = tuple[str | list[int] | list[dict[str, str]], dict[str, Any]]


def main(args: Sequence[str] | None = None) -> int:
    """Record every line of the input. Returns the exit code."""
    config = parse_config(RecordRoutingConfig, args, prog="moe_runtime.record_routing")

    def run(group: RankGroup) -> LLM:
        parsed = _parsed(config)
        with contextlib.ExitStack() as stack:
            output = stack.enter_context(open_output(config.output)) if group.rank == 0 else None
            with progress_bar("loading weights", shown=group.rank == 0) as on_progress:
                llm = LLM.from_config(config.engine, group=group, on_progress=on_progress)
            header = _header(llm)
            writer = None if output is None else RoutingLogWriter(output, header)
            with progress_bar("recording", shown=group.rank == 0) as on_progress:
                for start in range(0, len(parsed), config.batch_size):
                    _record(config, llm, parsed[start : start + config.batch_size], writer)
                    on_progress(min(start + config.batch_size, len(parsed)), len(parsed))
            if writer is not None and output is not None:
                writer.finish()
                output.flush()
                logger.info("recorded %d tokens of %d choices", writer.num_tokens, writer.num_records)
            llm.stop_engine()  # captured graphs hold on to the communicators that end next
        return llm

    return run_offline(config.engine.device, config.input, config.output, run)


def _parsed(config: RecordRoutingConfig) -> list[_Parsed]:
    lines = read_lines(config.input)
    if config.input_format == "text":
        return [(line, {}) for line in lines if line.strip()]
    return [parse_line(line, number) for number, line in enumerate(lines, 1) if line.strip()]


def _header(llm: LLM) -> RoutingLogHeader:
    model = llm.model.plan.config
    if not model.moe_layer_ids:
        raise ValueError(
            f"model ({llm.config.model}) has no layer with experts, so there is no routing to record"
        )
    return RoutingLogHeader(
        moe_layer_ids=tuple(model.moe_layer_ids),
        num_logical_experts=model.num_experts,
        num_topk=model.num_experts_per_tok,
        fingerprint=f"fp_{llm.model.plan.fingerprint}",
    )


def _record(
    config: RecordRoutingConfig, llm: LLM, parsed: Sequence[_Parsed], writer: RoutingLogWriter | None
) -> None:
    """Run some prompts; a collective of all ranks."""
    defaults = replace(llm.default_sampling_params(), max_tokens=config.max_tokens)
    results = llm.generate(
        [prompt_of(llm, prompt) for prompt, _ in parsed],
        [replace(defaults, **(given | {"return_routed_experts": True})) for _, given in parsed],
    )
    if writer is None:
        return
    for result in results:
        for output in result.outputs:
            assert output.routed_experts is not None, "all of them ask for it"
            writer.add(output.routed_experts)
