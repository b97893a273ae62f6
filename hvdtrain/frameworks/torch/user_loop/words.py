"""Example lines of a custom loop in torch, for messages."""

from __future__ import annotations

from hvdtrain.frameworks.user_loop import Words

WORDS = Words(
    prepare="model, optimizer = ctx.prepare(model, optimizer)",
    one='a name for each: ctx.prepare(model, optimizer, name="generator"); or one module that has '
    "all parts, with one optimizer of several groups",
    gradient="ctx.backward(loss)",
    step="optimizer.step()",
    resume="state = ctx.resume()",
    parts="ctx.accumulate()",
    counted="ctx.backward(loss, count=N), or ctx.accumulate() where loss_of returns (loss, N)",
)
