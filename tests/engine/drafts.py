"""Tiny large models, and drafts of every quality for them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from moonpool.c2c.config import C2CConfig, Model, Rule
from moonpool.c2c.convert import Conversion
from moonpool.c2c.projectors.identity import IdentityParameters, IdentityProjector
from moonpool.c2c.signature import load_spec
from moonpool.engine.draft import DraftModel
from tests.c2c.pairs import config, rule
from tests.engine.conftest import PAGE


def perturbed(model: Path, folder: Path, share: float) -> Path:
    """`model` with noise of `share` of each weight's deviation: often of one mind with it, not always."""
    made: Any = AutoModelForCausalLM.from_pretrained(model)
    torch.manual_seed(0)
    with torch.no_grad():
        for weight in made.parameters():
            if weight.dim() > 1:
                weight += share * weight.std() * torch.randn_like(weight)
    made.save_pretrained(folder)
    AutoTokenizer.from_pretrained(model).save_pretrained(folder)
    return folder


def draft_of(folder: Path, **options: Any) -> DraftModel:
    return DraftModel(ref=str(folder), spec=load_spec(folder), **options)


def rule_between(source: Path, target: Path) -> C2CConfig:
    """One rule between two models of one shape, for `identity`."""
    ends = [Model(f.name, str(f), s := load_spec(f), s.identity(PAGE).digest()) for f in (source, target)]
    return config(rule(*ends), page_size=PAGE)


def identity(between: Rule) -> Conversion:
    shape = between.source.spec.page_shape(PAGE)
    projector = IdentityProjector(IdentityParameters(layers=shape.layers, width=shape.width))
    return Conversion(projector, between.source.spec, between.target.spec, PAGE)
