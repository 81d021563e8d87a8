"""Prompts of a call as token ids."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass

from moe_runtime.engine.tokenizer import Tokenizer
from moe_runtime.errors import InvalidRequestError
from moe_runtime.server.schemas import ChatMessage, Prompts

__all__ = ["MAX_INLINE_CHARS", "MAX_PROMPTS", "Prompt", "chat_prompt", "completion_prompts"]

MAX_PROMPTS = 1024

# Longer texts are tokenised in a thread, so that other streams go on meanwhile.
MAX_INLINE_CHARS = 2048


@dataclass(frozen=True, slots=True, kw_only=True)
class Prompt:
    """One prompt.

    Attributes:
        param: What to call it in errors.
        ids: Its tokens.
        text: As the caller wrote it; None where it came as ids.
    """

    param: str
    ids: tuple[int, ...]
    text: str | None


async def completion_prompts(
    prompts: Prompts, tokenizer: Tokenizer, max_tokens: int | None = None, *, add_special_tokens: bool = True
) -> list[Prompt]:
    """Tokenise the prompts of a completion; ids are taken as they are, and checked later.

    Raises:
        InvalidRequestError: too many prompts, or one that cannot fit in ``max_tokens``.
    """
    if len(prompts) > MAX_PROMPTS:
        raise InvalidRequestError(
            f"prompt ({len(prompts)} prompts) must have at most {MAX_PROMPTS}", param="prompt"
        )

    def encode_all() -> list[Prompt]:
        result = []
        for index, prompt in enumerate(prompts):
            param = "prompt" if len(prompts) == 1 else f"prompt[{index}]"
            if isinstance(prompt, str):
                ids = tokenizer.encode(
                    prompt, add_special_tokens=add_special_tokens, param=param, max_tokens=max_tokens
                )
                result.append(Prompt(param=param, ids=tuple(ids), text=prompt))
            else:
                result.append(Prompt(param=param, ids=tuple(prompt), text=None))
        return result

    num_chars = sum(len(prompt) for prompt in prompts if isinstance(prompt, str))
    return encode_all() if num_chars <= MAX_INLINE_CHARS else await asyncio.to_thread(encode_all)


async def chat_prompt(
    messages: list[ChatMessage],
    tokenizer: Tokenizer,
    max_tokens: int | None = None,
    *,
    add_generation_prompt: bool = True,
    continue_final_message: bool = False,
    add_special_tokens: bool = False,
) -> Prompt:
    """Render a conversation with the checkpoint's template and tokenise it.

    Args:
        messages: The conversation.
        tokenizer: The checkpoint's.
        max_tokens: As for ``Tokenizer.encode``.
        add_generation_prompt: End with the header of the assistant's turn.
        continue_final_message: End inside the last message, the assistant's, which the answer continues.
        add_special_tokens: As for ``Tokenizer.encode``.

    Raises:
        InvalidRequestError: the template refuses the messages, or they cannot fit in ``max_tokens``.
    """
    if not messages:
        raise InvalidRequestError("messages must hold at least one message", param="messages")
    plain = [_plain(message) for message in messages]

    def render() -> Prompt:
        text = tokenizer.apply_chat_template(
            plain,
            add_generation_prompt=add_generation_prompt,
            continue_final_message=continue_final_message,
        )
        ids = tokenizer.encode(
            text, add_special_tokens=add_special_tokens, param="messages", max_tokens=max_tokens
        )
        return Prompt(param="messages", ids=tuple(ids), text=text)

    # Always in a thread: the template is a stranger's program, and may take all the time that it is allowed.
    return await asyncio.to_thread(render)


def _plain(message: ChatMessage) -> dict[str, str]:
    plain = {"role": "system" if message.role == "developer" else message.role, "content": message.content}
    if message.name is not None:
        plain["name"] = message.name
    return plain
