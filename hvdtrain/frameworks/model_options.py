"""Checks of the options of models that exist in torch and in JAX, with the same errors."""

from __future__ import annotations

from hvdtrain.errors import UserError


def check_mlp(widths: tuple[int, ...], dropout: float) -> None:
    """Checks options of mlp and wide_resnet. Raises UserError for widths below 1 and a dropout
    outside of 0 to 1."""
    if min(widths, default=1) < 1 or not 0 <= dropout < 1:
        raise UserError(
            f"widths {widths} with dropout {dropout} are not valid",
            "model.widths, model.dropout",
            "widths of 1 or more, 0 <= dropout < 1",
        )


def check_wide_resnet(
    shape: tuple[int, int, int], widths: tuple[int, int, int, int], dropout: float
) -> None:
    """Raises UserError as check_mlp(), and for images too small to be halved twice."""
    check_mlp(widths, dropout)
    if min(shape[:2]) < 4:
        raise UserError(
            f"images of {shape[0]}x{shape[1]} pixels cannot be halved twice",
            "model.name=wide_resnet",
            "model.name=mlp",
        )


def check_resnet(zero_gamma: bool, norm: bool) -> None:
    """Raises UserError for scales that start at 0 in a model without norms."""
    if zero_gamma and not norm:
        what = "model.norm=false leaves no scale that could start at 0"
        raise UserError(what, "model.zero_gamma", "leave one of model.zero_gamma, model.norm out")


def check_convnet(widths: tuple[int, ...], dense: tuple[int, ...]) -> None:
    """Raises UserError for widths below 1."""
    if min(dense, default=1) < 1:
        raise UserError(
            f"dense {dense} is not valid",
            "model.dense",
            "1 or more for each hidden dense layer, or leave it out",
        )
    if min(widths, default=0) < 1:
        raise UserError(
            f"widths {widths} are not valid",
            "model.widths",
            "one width of 1 or more for each convolution",
        )


def check_unet(
    shape: tuple[int, int, int], widths: tuple[int, ...], norm: str, groups: int
) -> None:
    """Raises UserError for widths that are not valid, or images that cannot be halved so often."""
    if min(widths, default=0) < 1:
        raise UserError(
            f"widths {widths} are not valid",
            "model.widths",
            "one width of 1 or more for each size",
        )
    if norm == "group" and any(width % max(groups, 1) for width in widths):
        what = f"model.groups={groups} does not divide the widths {', '.join(map(str, widths))}"
        raise UserError(what, "model.groups", "a number that divides each of them")
    factor = 2 ** (len(widths) - 1)
    if shape[0] % factor or shape[1] % factor:
        what = f"images of {shape[0]} x {shape[1]} pixels cannot be halved {len(widths) - 1} times"
        raise UserError(what, "model.widths", f"sides that {factor} divides, or fewer widths")


def check_gpt(layers: int, heads: int, width: int, **dropouts: float) -> None:
    """Raises UserError for sizes below 1, heads that do not divide the width, and a dropout outside
    of 0 to 1. dropouts: by the names of their options."""
    if min(layers, heads, width) < 1 or width % heads:
        what = f"{layers} layers of {heads} heads and width {width} are not valid"
        raise UserError(
            what,
            "model.layers, model.heads, model.width",
            "1 or more of each, and a width that is a multiple of heads",
        )
    for option, share in dropouts.items():
        if not 0 <= share < 1:
            raise UserError(
                f"a dropout of {share} would drop everything",
                f"model.{option}",
                "0 or more, below 1",
            )
