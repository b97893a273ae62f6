"""The most operations a second that a GPU can compute, by its name and the number type."""

from __future__ import annotations

import re
from typing import NamedTuple


class Peak(NamedTuple):
    """10^12 operations a second of dense matrix products; a multiply-add counts as two.

    float32: with TF32 if the GPU has it, because torch uses it for convolutions, and for matrix
    products if a script allows it. None: the GPU does not support the dtype, or its data sheet does
    not list it.
    """

    float16: float
    bfloat16: float | None
    float32: float
    float64: float | None


def _of_ampere(half: float, tf32: float, float64: float | None = None) -> Peak:
    """Returns the peak of a GPU from Ampere on, which computes float16 and bfloat16 equally
    fast."""
    return Peak(half, half, tf32, float64)


# A part of the name that torch reports, and the peak from the product's data sheet, or half of it
# if the sheet only has the value with sparsity. The first matching row counts.
_PEAKS = (
    (r"B200\b", _of_ampere(2250, 1125, 37)),  # HGX B200, an eighth
    (r"GH200\b", _of_ampere(989.5, 494.5, 67)),
    (r"H200 NVL\b", _of_ampere(835.5, 417.5, 60)),
    (r"H200\b", _of_ampere(989.5, 494.5, 67)),
    (r"H[18]00 NVL\b", _of_ampere(835.5, 417.5, 60)),
    (r"H[18]00 PCIe\b", _of_ampere(756.5, 378, 51)),
    (r"H100\b", _of_ampere(989.5, 494.5, 67)),
    (r"A[18]00\b", _of_ampere(312, 156, 19.5)),
    (r"A30\b", _of_ampere(165, 82, 10.3)),
    (r"A40\b", _of_ampere(149.7, 74.8)),
    (r"A10\b", _of_ampere(125, 62.5)),
    (r"RTX A6000\b", _of_ampere(154.8, 77.4)),
    (r"L40S\b", _of_ampere(362, 183)),
    (r"L40\b", _of_ampere(181, 90.5)),
    (r"L4\b", _of_ampere(121, 60)),
    # the white papers of GA102 and Ada, with sums in float32
    (r"RTX 3090\b", _of_ampere(71, 35.6)),
    (r"RTX 4090\b", _of_ampere(165.2, 82.6)),
    (r"V100-SXM", Peak(125, None, 15.7, 7.8)),
    (r"V100-PCIE", Peak(112, None, 14, 7)),
    (r"T4\b", Peak(65, None, 8.1, None)),
    # each half of a card is a device of torch
    (r"MI250X\b", Peak(191.5, 191.5, 47.9, 47.9)),
    (r"MI250\b", Peak(181, 181, 45.3, 45.3)),
    (r"MI210\b", Peak(181, 181, 45.3, 45.3)),
    (r"MI3(00|25)X\b", Peak(1307.4, 1307.4, 163.4, 163.4)),
)


def peak_tflops(name: str, number_type: str) -> float | None:
    """Returns the peak of the GPU that torch calls `name`, in 10^12 operations a second; None if
    the table does not have it, and for a part of a GPU (MIG).

    number_type: of matrix products, as torch names it: "bfloat16".
    """
    if re.search(r"\bMIG\b", name):
        return None
    peak = next((peak for pattern, peak in _PEAKS if re.search(rf"\b{pattern}", name)), None)
    return None if peak is None else getattr(peak, number_type, None)
