"""What is said, and lost, where a job can no longer use its run folder: deleted, renamed, read-only, or another job's."""

from __future__ import annotations

import contextlib
import errno
from pathlib import Path

from hvdtrain.core.folder import Folder
from hvdtrain.errors import UserError
from hvdtrain.training.run_lock.holder import Holder

GONE = (errno.ENOENT, errno.ENOTDIR, errno.ESTALE, errno.ELOOP)  # of a folder, or of a file that is made where it is absent
UNWRITABLE = (errno.EROFS, errno.EACCES, errno.EPERM)
_AGAIN = "the same command goes on from there"


def lost_folder(run: Path, folder: Folder, holder: Holder | None = None) -> UserError:
    """The error for a folder that does not have the job's lock under its path any more; holder: of the lock that is there."""
    newest = _newest_checkpoint(folder)
    lost = f"the steps after the checkpoint of step {newest} are lost" if newest is not None else "it has no checkpoint: all steps are lost"
    path = folder.path_now()
    if path is None:
        what = f"the run folder {run} was deleted while the job ran: its checkpoints and its events are lost"
        return UserError(what, str(run), "start the job again, with a folder that nothing clears")
    if not _is_at(run, folder):
        what = f"the run folder {run} was renamed to {path} while the job ran; {lost}"
        return UserError(what, str(path), f"move it back, or give run={path}: {_AGAIN}")
    what = (
        f"another job has taken the run folder {run}: {holder}"
        if holder
        else f"the lock of the run folder {run} was removed, or the folder is being deleted"
    )
    return UserError(f"{what}; {lost}", str(run), f"let one job run at a time; {_AGAIN}")


def unwritable_folder(run: Path, error: OSError) -> UserError:
    """The error for a folder that took a job's files before, and no longer does."""
    with contextlib.suppress(OSError), Folder.open(run) as folder:
        newest = _newest_checkpoint(folder)
        lost = f"the steps after the checkpoint of step {newest} are lost" if newest is not None else "all steps are lost"
        what = f"the run folder {run} can no longer be written ({error.strerror}); {lost}"
        return UserError(what, str(run), f"make it writable; {_AGAIN}")
    return UserError(f"the run folder {run} can no longer be used ({error.strerror})", str(run), f"make it writable; {_AGAIN}")


def _is_at(run: Path, folder: Folder) -> bool:
    with contextlib.suppress(OSError):
        return folder.is_at(run)
    return False


def _newest_checkpoint(folder: Folder) -> int | None:
    """Its step."""
    with contextlib.suppress(OSError), folder.folder("checkpoints") as checkpoints:
        steps = [name.removeprefix("step-") for name in checkpoints.names() if name.startswith("step-")]
        return max((int(step) for step in steps if step.isdecimal()), default=None)
    return None
