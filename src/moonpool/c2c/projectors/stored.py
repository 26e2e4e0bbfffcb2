"""How a bundle's file holds weights: as floats, or as 8-bit integers between a scale for each row and one for each column.

    weight[i, j] = number[i, j] · rows[i] · columns[j]       number int8 in −127 … 127

A weight `<name>` in 8 bits is three tensors: `<name>` int8, `<name>.scale.rows` and `<name>.scale.columns` fp32. Both scales are
needed: the rows of a map that reads features as they come are as unlike as the features are, and the columns of one that makes
the target's layers are as unlike as the layers.

A scale has few enough bits that the product is exact in fp32, and each scale belongs to a number of ±127 that says it again: so
a bundle that is read and written once more holds the same bytes.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from moonpool.errors import BundleCorrupt

ROWS, COLUMNS = ".scale.rows", ".scale.columns"
_LARGEST = 127
_ROW_BITS, _COLUMN_BITS = 8, 9
"""With the 7 of a number these are the 24 bits of an fp32 mantissa. The columns' rounding is too fine to show in the rows'."""
_SMALLEST_ROW, _SMALLEST_COLUMN = 2.0**-40, 2.0**-80
"""Keep the product a normal fp32 number, which has all its bits."""


def as_stored(tensors: Mapping[str, Tensor], dtype: torch.dtype) -> dict[str, Tensor]:
    """What is called a weight in `dtype` (a float type, or int8); biases, gains and gates stay fp32, they cost nothing.

    NaN and Inf give numbers that `as_read` or a projector refuses.
    """
    kept = dict[str, Tensor]()
    for name, tensor in tensors.items():
        if not name.endswith("weight"):
            kept[name] = tensor.to(torch.float32)
        elif dtype == torch.int8 and tensor.dim() > 1:
            parts = _in_8_bits(tensor.detach().to(torch.float32))
            kept |= dict(zip((name, name + ROWS, name + COLUMNS), parts, strict=True))
        else:
            kept[name] = tensor.to(dtype if dtype.is_floating_point else torch.float32)
    return kept


def as_read(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Inverse: weights in 8 bits become fp32, all else is left as it is.

    Raises BundleCorrupt: a scale is missing, misshapen, not fp32, or not a positive finite number.
    """
    found = dict(tensors)
    for name in [n for n, t in tensors.items() if t.dtype == torch.int8]:
        shape = found[name].shape
        if len(shape) < 2:
            raise BundleCorrupt("8-bit weight without rows and columns", key=name, have=str(list(shape)))
        rows = _scale(found, name + ROWS, shape[:-1])
        columns = _scale(found, name + COLUMNS, (*shape[:-2], shape[-1]))
        found[name] = (found[name] * columns[..., None, :]).mul_(rows[..., :, None])
    return found


def _scale(tensors: dict[str, Tensor], name: str, shape: tuple[int, ...]) -> Tensor:
    """The scale, checked and taken out."""
    scale = tensors.pop(name, None)
    if scale is None:
        raise BundleCorrupt("scale of an 8-bit weight is missing", key=name)
    if scale.dtype != torch.float32 or scale.shape != shape:
        have = f"{scale.dtype} {list(scale.shape)}"
        raise BundleCorrupt("scale of the wrong type or shape", key=name, need=f"fp32 {list(shape)}", have=have)
    if not bool(((scale > 0) & scale.isfinite()).all()):
        raise BundleCorrupt("scale is not positive and finite", key=name, fix="Fit or download the bundle again.")
    return scale


def _in_8_bits(weight: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """(numbers, rows, columns) of `[..., rows, columns]`.

    A column's scale takes its largest number to 127; a row's does so with what is left, and is 1 in a row that has a column's
    largest. Hence both can be told from the numbers that come out.
    """
    columns = _short(weight.abs().amax(-2) / _LARGEST, _COLUMN_BITS).clamp(min=_SMALLEST_COLUMN)
    left = weight / columns[..., None, :]
    rows = _short(left.abs().amax(-1) / _LARGEST, _ROW_BITS).clamp(min=_SMALLEST_ROW, max=1)
    numbers = (left / rows[..., :, None]).round().clamp(-_LARGEST, _LARGEST)
    return numbers.to(torch.int8), rows, columns


def _short(x: Tensor, bits: int) -> Tensor:
    """Rounded to a mantissa of `bits` bits."""
    mantissa, exponent = torch.frexp(x)
    return torch.ldexp(torch.ldexp(mantissa, torch.tensor(bits)).round(), exponent - bits)
