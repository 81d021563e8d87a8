"""The byte-level BPE tokenizer: vocabulary size, special tokens, how text is cut before merges."""

from __future__ import annotations

from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers

END_OF_TEXT, IM_START, IM_END = SPECIAL_TOKENS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
VOCAB_SIZE = 2048
QWEN_SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


def train_tokenizer(scenes: list[str]) -> Tokenizer:
    """Learns a byte-level BPE of exactly ``VOCAB_SIZE`` entries; the special tokens take the last ids."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(QWEN_SPLIT), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.post_processor = processors.ByteLevel(trim_offsets=False)
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE - len(SPECIAL_TOKENS),
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(scenes, trainer)
    tokenizer.add_special_tokens(list(SPECIAL_TOKENS))
    if tokenizer.get_vocab_size() != VOCAB_SIZE:
        raise ValueError(
            f"vocabulary ({tokenizer.get_vocab_size()}) must be {VOCAB_SIZE}: the corpus is too small"
        )
    return tokenizer


def special_id(tokenizer: Tokenizer, token: str) -> int:
    """Id of a token that is in the vocabulary."""
    token_id = tokenizer.token_to_id(token)
    assert token_id is not None, f"{token} must be in the vocabulary"
    return int(token_id)
