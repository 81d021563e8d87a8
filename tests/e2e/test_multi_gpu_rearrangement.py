"""Moves of experts between two GPUs: pushed into each other's memory, without a changed bit, and faults are found.

Ranks share a GPU where there is one (tests/shared_gpu.py); without any nothing of this runs. ``DEVICE`` set to "cpu"
shows that the script works, through the hosts' memory.
"""

from __future__ import annotations

import pytest

from tests.gpu_ranks import needs_gpus
from tests.rank_programs import run_to_end

DEVICE = "cuda"

pytestmark = [
    pytest.mark.multigpu,
    needs_gpus(1 if DEVICE == "cuda" else 0),
    pytest.mark.timeout(300),
]

SCRIPT = """
import sys
from dataclasses import replace
import numpy as np
from moe_runtime.engine.expert_transfer import MoveError
from moe_runtime.engine.llm import LLM
from moe_runtime.engine.request import SamplingParams
from moe_runtime.launch.distributed import close_ranks, init_ranks

device, eager = sys.argv[1], sys.argv[2] == "eager"
group = init_ranks(device)
llm = LLM("builtin", device=device, group=group, num_redundant_experts=int(sys.argv[3]), speculative="ngram",
          rearrange_interval=1 << 40, enforce_eager=eager, max_num_seqs=8, kv_cache_blocks=32)
seeded = SamplingParams(temperature=0.8, seed=5, max_tokens=40, logprobs=3, ignore_eos=True)
params = [seeded, replace(seeded, temperature=0)] * 3
prompts = [[5 + i, 6, 7 * i + 1] * (1 + i % 2 * 3) for i in range(6)]  # half of them for n-grams

def outputs(**options):
    return [(o.token_ids, o.logprobs) for r in llm.generate(prompts, params, **options) for o in r.outputs]

def placements(*seeds):
    now = llm.placement
    return [replace(now, physical_to_logical_map=np.random.default_rng(s).permuted(
        now.physical_to_logical_map, axis=1)) for s in seeds]

expected = outputs()
store = llm.engine.mover._transfer.store
assert store.pushes == (device == "cuda"), "GPUs of one host push"
first, second, third = placements(1, 2, 3)
assert outputs(moves={1: first, 6: None, 12: second}) == expected
assert llm.placement == second and min(llm.engine.mover.versions) >= 2
assert llm.engine.mover.stats().num_bytes > 0
assert outputs() == expected
# Controls: a wrong expert is refused by its checksum, and with the check off it shows in the bits.
way = "push" if store.pushes else "read"
right = getattr(store, way)
setattr(store, way, lambda layer, slot, *rest: right(layer, (slot + 1) % store.num_slots, *rest))
try:
    outputs(moves={1: third})
except MoveError as error:
    assert "has checksum" in str(error), error
else:
    raise AssertionError("a wrong expert was taken")
assert outputs() == expected
llm.engine.mover._transfer.verifies = False
assert outputs(moves={1: third}) != expected
llm.close()
print("rank", group.rank, "has passed")
close_ranks(replace(llm.group, links=None))
"""


@pytest.mark.parametrize("num_redundant", [0, 1, 3])
@pytest.mark.parametrize("form", ["graphs", "eager"])
def test_pushed_experts_change_no_bit_and_wrong_ones_are_found(form, num_redundant, tmp_path):
    script = tmp_path / "moves.py"
    script.write_text(SCRIPT)
    done = run_to_end(2, str(script), DEVICE, form, str(num_redundant), timeout_s=250)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    assert done.stdout.count("has passed") == 2
