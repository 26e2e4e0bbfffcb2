"""Hand-made model specs, projectors and rules: the converter's world without any model."""

from __future__ import annotations

import torch
from torch import Tensor

from moonpool.c2c.config import C2CConfig, Mode, Model, Rule, Serve
from moonpool.c2c.convert import Conversion
from moonpool.c2c.pages import pack
from moonpool.c2c.projectors.identity import IdentityParameters, IdentityProjector
from moonpool.c2c.signature import ModelSpec, RopeSpec
from moonpool.keys import PageKey
from moonpool.types import PageShape

PAGE = 4
BUNDLE = "b" * 32


def spec(name: str = "source", *, layers: int = 2, kv_heads: int = 2, dim: int = 8, theta: float = 1e4) -> ModelSpec:
    return ModelSpec(
        name=name,
        revision="r" + name,
        tokenizer="t",
        model_type="qwen3",
        num_layers=layers,
        num_heads=2 * kv_heads,
        num_kv_heads=kv_heads,
        head_dim=dim,
        hidden=2 * kv_heads * dim,
        rope=RopeSpec(theta=theta, rotary_dim=dim),
        qk_norm=True,
        dtype="bfloat16",
        max_positions=4096,
        vocab_size=100,
    )


def model(name: str, of: ModelSpec | None = None, page_size: int = PAGE) -> Model:
    of = of or spec(name)
    return Model(name, name, of, of.identity(page_size).digest())


def rule(
    source: Model,
    target: Model,
    *,
    mode: Mode = "on_put",
    serve: Serve = "always",
    digest: str = BUNDLE,
    bundle: str = "-",
    deadline_s: float = 30.0,
    force: bool = False,
) -> Rule:
    return Rule(source, target, bundle, digest, mode, serve, deadline_s, force=force)


def config(*rules: Rule, queue_pages: int = 1000, workers: int = 1, page_size: int = PAGE) -> C2CConfig:
    models = {m.name: m for r in rules for m in (r.source, r.target)}
    return C2CConfig(models=models, rules=list(rules), page_size=page_size, queue_pages=queue_pages, workers=workers)


def identity_of(source: Rule) -> Conversion:
    """A rule's conversion with the identity projector; its two models must have one shape."""
    shape = source.source.spec.page_shape(PAGE)
    return Conversion(
        IdentityProjector(IdentityParameters(layers=shape.layers, width=shape.width)),
        source.source.spec,
        source.target.spec,
        PAGE,
    )


def random_kv(shape: PageShape, pages: int, seed: int = 0) -> list[bytearray]:
    torch.manual_seed(seed)

    def half() -> Tensor:
        return torch.randn(shape.tokens, shape.layers, shape.heads, shape.dim)

    return [pack(half(), half()) for _ in range(pages)]


def keys_of(of: Model, tokens: int, page_size: int = PAGE) -> list[PageKey]:
    return of.spec.identity(page_size).page_keys(range(tokens))
