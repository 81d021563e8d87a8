"""The GPU decoder's two forms: equal bits, inert padding, and the CPU decoder's values to the accuracy of the dtype."""

from __future__ import annotations

import pytest
import torch

from moe_runtime.engine.llm import LLM
from moe_runtime.engine.request import SamplingParams
from moe_runtime.errors import CapacityError
from tests.bits import assert_bits_equal
from tests.gpu_engine import gpu_llm, write_gpu_checkpoint
from tests.kernels.triton_interpreter import DEVICE

from moe_runtime.comm.gpu_exchange import StepShape  # isort: skip
from moe_runtime.kernels.attention_tiles import make_row_tiles  # isort: skip
from moe_runtime.kernels.attention_triton import CANONICAL_DECODE  # isort: skip
from moe_runtime.kernels.prefill_attention_triton import CANONICAL_ROWS  # isort: skip
from moe_runtime.layers import cuda_decoder  # isort: skip
from moe_runtime.layers.cuda_decoder import MAX_DECODE_ROWS, CudaDecoder, MixedInput, RowTiles  # isort: skip

VOCAB = 96
NUM_BLOCKS = 4
CPU_TOLERANCE = 0.1  # bf16 paths of other trees, logits of a few units


LIMITS = {"max_num_seqs": 4, "max_num_batched_tokens": 32, "kv_cache_blocks": 8}


def load(folder) -> CudaDecoder:
    found = gpu_llm(folder, **LIMITS).model.decoder
    assert isinstance(found, CudaDecoder)
    return found


@pytest.fixture(scope="module")
def decoder(tmp_path_factory) -> CudaDecoder:
    return load(write_gpu_checkpoint(tmp_path_factory.mktemp("decoder"), num_hidden_layers=1))


def caches(decoder: CudaDecoder, fill: float = 0.0):
    shape = (NUM_BLOCKS, decoder.config.num_kv_heads, 64, decoder.config.head_dim)

    def make() -> torch.Tensor:
        return torch.full(shape, fill, dtype=decoder.dtype, device=DEVICE)

    return [(make(), make()) for _ in decoder.layers]


def ints(*values: int) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32, device=DEVICE)


def decode(decoder: CudaDecoder, token_ids, positions, blocks, num_tokens: int, kv):
    """Logits of a decode step; row i has block ``blocks[i]``."""
    logits = torch.full((len(token_ids), VOCAB), float("nan"), device=DEVICE)
    table = ints(*blocks).view(-1, 1)
    with torch.inference_mode():
        decoder.decode(
            ints(*token_ids), ints(*positions), table, ints(num_tokens), kv, CANONICAL_DECODE, logits
        )
    return logits


def mixed(decoder: CudaDecoder, token_ids, start: int, block: int, kv):
    """Logits of a chunk of one sequence."""
    groups = decoder.config.num_query_heads_per_kv_head
    num = len(token_ids)
    tiles = make_row_tiles(
        [num], [start], num_groups=groups, block_rows=CANONICAL_ROWS.block_rows, sequences=[0]
    )
    step = MixedInput(
        shape=StepShape.of_tokens([num]),
        token_ids=ints(*token_ids),
        positions=ints(*range(start, start + num)),
        slot_mapping=torch.arange(64 * block + start, 64 * block + start + num, device=DEVICE),
        num_tokens=ints(num),
        block_table=ints(block).view(1, 1),
        tiles=[RowTiles(schedule=CANONICAL_ROWS, tiles=torch.from_numpy(tiles).to(DEVICE))],
    )
    with torch.inference_mode():
        return decoder.logits(decoder.mixed(step, kv)).clone()


def test_decode_and_mixed_give_one_row_the_same_bits_and_the_same_cache(decoder):
    ids = [5, 9, 81, 3]
    by_chunk, by_token = caches(decoder), caches(decoder)
    whole = mixed(decoder, ids, 0, 2, by_chunk)
    rows = [decode(decoder, [token], [i], [2], 1, by_token) for i, token in enumerate(ids)]
    assert_bits_equal(torch.cat(rows), whole)
    for (k, v), (other_k, other_v) in zip(by_chunk, by_token, strict=True):
        assert_bits_equal(k, other_k)
        assert_bits_equal(v, other_v)


def test_attention_biases_have_one_value_in_both_forms_and_on_the_cpu(tmp_path):
    folder = write_gpu_checkpoint(tmp_path, num_hidden_layers=1, attention_bias=True)
    decoder, ids = load(folder), [5, 9, 81, 3]
    assert decoder.layers[0].qkv_bias is not None
    by_token = caches(decoder)
    whole = mixed(decoder, ids, 0, 2, caches(decoder))
    rows = [decode(decoder, [token], [i], [2], 1, by_token) for i, token in enumerate(ids)]
    assert_bits_equal(torch.cat(rows), whole)
    score = SamplingParams(temperature=0.0, max_tokens=0, prompt_logprobs=0)
    [scored] = LLM(str(folder), device="cpu", **LIMITS).generate([ids], score)
    ours = torch.log_softmax(whole, 1).cpu()
    for i, entry in enumerate(scored.prompt_logprobs[1:]):
        assert abs(ours[i, ids[i + 1]] - entry.logprob) < CPU_TOLERANCE
    for name, bias in (("qkv", decoder.layers[0].qkv_bias), ("o", decoder.layers[0].o_bias)):
        kept = bias.clone()
        bias.zero_()
        assert not torch.equal(mixed(decoder, ids, 0, 2, caches(decoder)), whole), name
        bias.copy_(kept)


def test_inert_rows_touch_neither_the_cache_nor_a_live_row(decoder):
    kv = caches(decoder)
    alone = decode(decoder, [5], [0], [1], 1, kv)
    padded_kv = caches(decoder)
    for tensor in (decoder.buffers.residual, decoder.buffers.normed, decoder.experts._rows):
        tensor.fill_(float("nan"))
    padded = decode(decoder, [5, -1, -1, -1], [0, -1, -1, -1], [1, -1, -1, -1], 1, padded_kv)
    assert_bits_equal(padded[:1], alone)
    for (k, v), (other_k, other_v) in zip(kv, padded_kv, strict=True):
        assert_bits_equal(k, other_k)
        assert_bits_equal(v, other_v)


def test_a_nan_in_one_row_stays_there(decoder):
    plain = decode(decoder, [5, 6], [0, 0], [1, 2], 2, caches(decoder))
    embedding = decoder.embedding
    kept = embedding[6].clone()
    try:
        embedding[6] = float("nan")
        poisoned = decode(decoder, [5, 6], [0, 0], [1, 2], 2, caches(decoder))
    finally:
        embedding[6] = kept
    assert_bits_equal(poisoned[0], plain[0])
    assert poisoned[1].isnan().all()


def test_room_for_rows_is_what_was_asked_for_last(decoder):
    before = decoder.buffers
    decoder.reserve_rows(8)
    assert decoder.buffers is before
    decoder.reserve_rows(MAX_DECODE_ROWS + 400)
    assert decoder.buffers.max_rows == MAX_DECODE_ROWS + 400
    decoder.reserve_rows(MAX_DECODE_ROWS + 40)
    assert decoder.buffers.normed.shape[0] == decoder.buffers.max_rows == MAX_DECODE_ROWS + 40
    assert decoder.experts.routed_rows(StepShape.of_tokens([17])).slot_table.shape == (4, 32)


@pytest.mark.parametrize("what", ["Buffers", "LocalExperts"])
def test_rows_without_room_leave_the_room_there_was(decoder, monkeypatch, what):
    before, former = decode(decoder, [5], [0], [1], 1, caches(decoder)), decoder.buffers.max_rows
    make = getattr(cuda_decoder, what)

    def in_little_memory(*arguments):
        (max_rows,) = (value for value in arguments if type(value) is int)
        if max_rows > former:
            raise torch.OutOfMemoryError("13 GiB asked for")
        return make(*arguments)

    monkeypatch.setattr(cuda_decoder, what, in_little_memory)
    message = (
        rf"no room for steps of {former + 100} tokens: lower max_num_batched_tokens \(13 GiB asked for\)"
    )
    with pytest.raises(CapacityError, match=message):
        decoder.reserve_rows(former + 100)
    assert decoder.max_rows == decoder.buffers.max_rows == former
    assert_bits_equal(decode(decoder, [5], [0], [1], 1, caches(decoder)), before)
    monkeypatch.undo()
    decoder.reserve_rows(former + 100)
    assert decoder.buffers.max_rows == former + 100


def test_a_decoder_that_has_lost_its_room_gets_it_back_when_there_is_some(decoder, monkeypatch):
    def in_no_memory(*arguments):
        raise torch.OutOfMemoryError("nothing left")

    with monkeypatch.context() as patch:
        patch.setattr(cuda_decoder, "Buffers", in_no_memory)
        for _ in range(2):
            with pytest.raises(CapacityError, match="nothing left"):
                decoder.reserve_rows(decoder.max_rows + 8)
    decoder.reserve_rows(MAX_DECODE_ROWS)
    assert decoder.buffers.max_rows == MAX_DECODE_ROWS
