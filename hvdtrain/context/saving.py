"""Saving: when the checkpoints of a script's loop are written, what they contain, and how a loop
resumes."""

from __future__ import annotations

import dataclasses
from typing import Any

from hvdtrain.comm.on_all_ranks import on_rank_0
from hvdtrain.context.loop import ScriptLoop
from hvdtrain.context.saved import Restored, decoded, evaluated, restore
from hvdtrain.context.stream import SampleOrder
from hvdtrain.core.metrics import Better
from hvdtrain.errors import UserError
from hvdtrain.training.sync_point import write_last_checkpoint


class Saving:
    """The part of a Context that handles checkpoints; its methods have the same names as the
    Context's."""

    def __init__(self, loop: ScriptLoop) -> None:
        self._loop = loop
        self.failure = ""  # why the last checkpoint was not written
        # the script's arguments of the last ctx.checkpoint()
        self._extra: dict[str, Any] | None = None
        self._is_checked = False  # whether checkpoints can hold them
        self._written_step = -1  # step of the newest checkpoint of this loop

    def resume(self, prepared: tuple[Any, ...]) -> Any:
        loop = self._loop
        loop.need("ctx.resume()")
        loop.learner.check_resume(prepared)
        if loop.stream is not None:
            raise UserError(
                "ctx.resume() was called after ctx.samples()",
                "ctx.resume()",
                "call it right after ctx.prepare()",
            )
        loop.run.need("ctx.resume()")
        loop.is_resumed = True
        loop.heartbeat.beat("reading the checkpoint", 0, 0)
        try:
            found = restore(
                loop.communicator,
                loop.learner,
                loop.run.former,
                loop.limit_bytes,
                loop.heartbeat.go_on,
            )
        except UserError as error:
            if error.where in ("state of the model", "state of the optimizer"):
                error.where = f"{loop.run.former}"
                error.fix = (
                    "the model and the optimizer that the checkpoint was made with; or another run="
                )
            raise
        return loop.learner.resumed({} if found is None else self._go_on_from(found))

    def _go_on_from(self, found: Restored) -> dict[str, Any]:
        loop = self._loop
        run = loop.run
        assert run.path is not None
        values = decoded(found.extra, loop.framework.from_arrays, run.path)
        run.notes += found.notes
        loop.points.go_on_from(dataclasses.replace(found.train_state, is_kept=False))
        loop.order = SampleOrder(*values["order"])
        if loop.points.checkpoints.saver is not None:
            loop.points.checkpoints.saver.resume_from(found.train_state)
        extra: dict[str, Any] = values["extra"]
        return extra

    def checkpoint(
        self,
        model: Any,
        optimizer: Any,
        *,
        now: bool,
        objective: Any,
        better: Better,
        extra: dict[str, Any],
    ) -> bool:
        loop = self._loop
        points = self._check_may_save(model, optimizer)
        values = {"order": list(loop.order or ()), "extra": extra}
        self._extra = extra
        if not self._is_checked:  # at the first call, not only when a checkpoint is due
            loop.framework.to_arrays(values)
            self._is_checked = True
        is_last = points.now.progress.done
        wanted = now or objective is not None
        points.sync(force=wanted or is_last or points.save_due)
        is_last = is_last or bool(points.health.stop_request)
        if not (wanted or is_last or points.save_due):
            return False
        if objective is not None:
            points.now = evaluated(loop.communicator, points.now, objective, better)
        points.save_due = False
        points.confirm()
        loop.saved.extra = loop.framework.to_arrays(values)
        self._written_step = loop.step
        if now or not is_last:
            points.checkpoints.save(dataclasses.replace(points.now, is_kept=now))
        if not is_last:
            return True
        self._write_last()
        return not self.failure

    def _check_may_save(self, model: Any, optimizer: Any) -> Any:
        """Returns the sync points of the loop. Raises UserError if no checkpoint can be written
        now."""
        loop = self._loop
        loop.need("ctx.checkpoint()")
        loop.learner.check_prepared(model, optimizer, "ctx.checkpoint()")
        if loop.stream is None:
            raise UserError(
                "ctx.checkpoint() was called before ctx.samples()",
                "ctx.checkpoint()",
                f"call it inside the loop, after {loop.words.step}",
            )
        loop.run.need("ctx.checkpoint()")
        loop.learner.end_steps()
        if not loop.learner.has_stepped:
            raise UserError(
                "the step of this batch has not been made yet",
                "ctx.checkpoint()",
                f"call it after {loop.words.whole_step}",
            )
        return loop.points

    def _write_last(self) -> None:
        points = self._loop.points
        failure = write_last_checkpoint(
            points, points.now, self._loop.why_over, is_over=points.now.progress.done
        )
        self.failure = failure and f"{failure}; older ones are there"

    def save_at_stop(self) -> None:
        """Writes the checkpoint of the step at which the loop stops, if the script has not.

        If the script keeps values of that step that are not known here, no checkpoint is written,
        and the last event reports that.
        """
        loop = self._loop
        if (
            loop.run.path is None
            or not loop.points.health.stop_request
            or self._written_step == loop.step
        ):
            return
        self.failure = on_rank_0(loop.communicator, self._why_not_saved)
        if self.failure:
            return
        loop.saved.extra = loop.framework.to_arrays(
            {"order": list(loop.order or ()), "extra": self._extra or {}}
        )
        self._write_last()

    def _why_not_saved(self) -> str:
        """Returns why rank 0, whose values count, cannot save the script's state; empty if
        everything that the script keeps is known at this step."""
        own = [
            name for name, value in (self._extra or {}).items() if not hasattr(value, "state_dict")
        ]
        if own:
            why = f"it keeps {', '.join(own[:3])}, which only the script knows"
        elif self._extra is None:
            why = "ctx.checkpoint() was not called, so what the script keeps is not known"
        elif not self._loop.learner.has_stepped:
            why = "its step is not made"
        else:
            return ""
        assert self._loop.run.path is not None
        older = (
            "older ones are there"
            if any((self._loop.run.path / "checkpoints").glob("step-*"))
            else "there is no older one"
        )
        return f"{why}: call it in every step, before ctx.should_stop; {older}"
