"""From an OpenAI-style body to the prompt's chain of blocks.

An engine's own token ids tell exactly what it has cached, so a model's tokenizer and chat template are used where the conductor has
them. Without, the text itself is cut into chunks: good enough to send equal beginnings to the same place, and no claim about tokens
(`exact` is False; events of engines cannot be matched then).
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

import jinja2
import jinja2.sandbox
import msgspec
import xxhash
from tokenizers import Tokenizer

from moonpool.conductor.chain import Context, KeyChain, TokenChain
from moonpool.conductor.types import Chain
from moonpool.errors import ConfigError, RequestError

CHUNK = 256
"""Characters of a text block."""
CHARACTERS_PER_TOKEN = 4
"""For lengths that are only guessed."""
_MAX_TEMPLATE = 1 << 20


class Prompt(msgspec.Struct, frozen=True):
    chain: Chain
    tokens: int
    block_size: int
    exact: bool
    """Whether `chain` is over the engine's own tokens."""
    ids: Sequence[int] = ()


class Message(msgspec.Struct, frozen=True):
    role: str
    content: Any = None


class PromptBody(msgspec.Struct, frozen=True, kw_only=True):
    """What the conductor reads of a body; all else is passed on as it is."""

    model: str = ""
    prompt: str | list[Any] | None = None
    messages: list[dict[str, Any]] | None = None
    tools: list[Any] | None = None
    max_tokens: int | None = None
    max_completion_tokens: int | None = None
    stream: bool | None = None
    cache_salt: str = ""
    user: str = ""
    prompt_cache_key: str = ""
    priority: int = 0

    @property
    def answer_tokens(self) -> int:
        """Asked for at most; a guess where nothing is said."""
        return self.max_completion_tokens or self.max_tokens or 256


class PromptReader(Protocol):
    def read(self, body: PromptBody, tenant: str) -> Prompt:
        """Raises RequestError."""
        ...


class TextReader:
    """Blocks of CHUNK characters."""

    def __init__(self, model: str) -> None:
        self._model = model

    def read(self, body: PromptBody, tenant: str) -> Prompt:
        if isinstance(body.prompt, list) and body.prompt and isinstance(body.prompt[0], int):
            return _of_ids(
                body.prompt,
                Context(tenant, self._model, block_size=CHUNK // CHARACTERS_PER_TOKEN, salt=body.cache_salt),
            )
        text = _plain(body)
        seed = xxhash.xxh3_64_intdigest("\0".join((tenant, self._model, body.cache_salt)).encode())
        keys: list[int] = []
        for start in range(0, len(text) - CHUNK + 1, CHUNK):
            seed = xxhash.xxh3_64_intdigest(text[start : start + CHUNK].encode(), seed=seed)
            keys.append(seed)
        tokens = max(1, len(text) // CHARACTERS_PER_TOKEN)
        return Prompt(KeyChain(keys), tokens, CHUNK // CHARACTERS_PER_TOKEN, exact=False)


class TokenReader:
    """The model's own tokenizer and chat template, from its folder."""

    def __init__(self, model: str, folder: Path, block_size: int) -> None:
        """Raises ConfigError: no tokenizer there, or a template that is none."""
        self._model, self._block_size = model, block_size
        try:
            self._tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
        except Exception as e:  # process edge: the Rust side raises bare `Exception` for a missing or broken file
            raise ConfigError("cannot read the tokenizer", key=str(folder), have=str(e), need="tokenizer.json") from e
        self._template, self._special = _template(folder)

    def read(self, body: PromptBody, tenant: str) -> Prompt:
        return _of_ids(
            self.tokens(body), Context(tenant, self._model, block_size=self._block_size, salt=body.cache_salt)
        )

    def tokens(self, body: PromptBody) -> Sequence[int]:
        """Token ids as the engine makes them. Raises RequestError."""
        if body.messages is not None:
            return self._encode(self._rendered(body), special=False)
        match body.prompt:
            case str(text):
                return self._encode(text, special=True)
            case [str(text)]:
                return self._encode(text, special=True)
            case [int(), *_]:
                return list(body.prompt)
            case [[int(), *_] as ids]:
                return [int(i) for i in ids]
        raise RequestError("one prompt a request", fix="Send `messages`, a string, or one list of token ids.")

    def _encode(self, text: str, *, special: bool) -> Sequence[int]:
        ids: list[int] = self._tokenizer.encode(text, add_special_tokens=special).ids
        return ids

    def _rendered(self, body: PromptBody) -> str:
        if self._template is None:
            raise RequestError("this model has no chat template", fix="Use /v1/completions.")
        try:
            return self._template.render(
                messages=[_flat(m) for m in body.messages or []],
                tools=body.tools or None,
                add_generation_prompt=True,
                **self._special,
            )
        except (jinja2.TemplateError, TypeError, ValueError, KeyError) as e:
            raise RequestError(f"the chat template refuses these messages: {e}") from e


def _of_ids(ids: Sequence[int], context: Context) -> Prompt:
    if not ids:
        raise RequestError("an empty prompt")
    return Prompt(TokenChain(ids, context), len(ids), context.block_size, exact=True, ids=ids)


def _flat(message: Mapping[str, Any]) -> dict[str, Any]:
    """Content that is a list of text parts as one string: what most templates expect."""
    content = message.get("content")
    if isinstance(content, list) and all(isinstance(p, dict) and p.get("type") == "text" for p in content):
        return {**message, "content": "".join(str(p.get("text", "")) for p in content)}
    return dict(message)


def _plain(body: PromptBody) -> str:
    """Text that is equal from the start where the prompt is."""
    if body.messages is not None:
        tools = json.dumps(body.tools, sort_keys=True) if body.tools else ""
        return tools + "".join(f"\x1e{m.get('role', '')}\x1f{_content(m.get('content'))}" for m in body.messages)
    match body.prompt:
        case str(text) | [str(text)]:
            return text
    raise RequestError("one prompt a request", fix="Send `messages`, a string, or one list of token ids.")


def _content(content: Any) -> str:
    return content if isinstance(content, str) else json.dumps(content, sort_keys=True)


def _template(folder: Path) -> tuple[jinja2.Template | None, dict[str, str]]:
    """The chat template, and the special tokens that it may name."""
    config: dict[str, Any] = {}
    if (file := folder / "tokenizer_config.json").is_file():
        config = msgspec.json.decode(file.read_bytes(), type=dict[str, Any])
    source = config.get("chat_template")
    if (file := folder / "chat_template.jinja").is_file():
        source = file.read_text()
    special = {k: _token(config.get(k)) for k in ("bos_token", "eos_token", "pad_token", "unk_token") if config.get(k)}
    if not isinstance(source, str) or not source:
        return None, special
    if len(source) > _MAX_TEMPLATE:
        raise ConfigError("chat template too large", key=str(folder), need=f"<= {_MAX_TEMPLATE} characters")
    made = jinja2.sandbox.ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"]
    )
    made.filters["tojson"] = lambda value, indent=None: json.dumps(value, ensure_ascii=False, indent=indent)
    made.globals["raise_exception"] = _raise
    try:
        return made.from_string(source), special
    except jinja2.TemplateError as e:
        raise ConfigError(f"not a chat template: {e}", key=str(folder)) from e


def _raise(message: str) -> None:
    raise jinja2.TemplateError(message)


def _token(found: Any) -> str:
    return str(found.get("content", "")) if isinstance(found, dict) else str(found)
