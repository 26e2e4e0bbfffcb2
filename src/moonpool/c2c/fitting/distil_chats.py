"""Text as conversations, so that a map is taught on the chat template's tokens too: a few special ones, which plain text never
has, and much hangs on them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from moonpool.errors import ConfigError

_TURNS = 4


def chats(documents: Sequence[Tensor], tokenizer: Any) -> list[Tensor]:
    """Each document (`[N]` token ids) as turns of a user and an assistant, in the model's own chat template, cut to `N` tokens.
    Raises ConfigError if the model has no template."""
    if not getattr(tokenizer, "chat_template", None):
        raise ConfigError("the target has no chat template", fix="Give --chat-share 0.")
    return [_chat(d, tokenizer) for d in documents]


def _chat(document: Tensor, tokenizer: Any) -> Tensor:
    turns = [
        {"role": ("user", "assistant")[i % 2], "content": tokenizer.decode(part.tolist())}
        for i, part in enumerate(document.tensor_split(_TURNS))
    ]
    text = tokenizer.apply_chat_template(turns, tokenize=False)
    return torch.tensor(tokenizer.encode(text, add_special_tokens=False), dtype=torch.int64)[: len(document)]
