"""MLflow: parameters, the numbers of each event, and how the job ended, on a tracking server or in
RUN/mlflow."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING

from hvdtrain.config.schema import Config
from hvdtrain.core.folder import Folder
from hvdtrain.events.log import Event
from hvdtrain.extras.trackers.tracker_data import (
    METRICS,
    flat_config,
    load_run_id,
    metric_names,
    require_package,
    save_run_id,
    scalars,
)

if TYPE_CHECKING:
    from mlflow.entities import Run
    from mlflow.tracking import MlflowClient

STATUS = {"end": "FINISHED", "stop": "KILLED"}  # otherwise FAILED


def check_installed() -> None:
    """Raises UserError if mlflow is not installed; imports nothing."""
    require_package("mlflow", "mlflow")


def build(config: Config, run: Path) -> Mlflow:
    """Builds a tracker for the server MLFLOW_TRACKING_URI, by default RUN/mlflow, in the experiment
    MLFLOW_EXPERIMENT_NAME, by default hvdtrain.

    Raises UserError if mlflow is not installed; it is imported at the first event. Show RUN/mlflow
    with: MLFLOW_ALLOW_FILE_STORE=true mlflow ui --backend-store-uri RUN/mlflow
    """
    check_installed()
    return Mlflow(config, run.resolve())


class Mlflow:
    """One MLflow run for a job, however often it is resumed. Steps that a resumed job repeats have
    two values."""

    def __init__(self, config: Config, run: Path) -> None:
        self._metrics = METRICS
        self._config = config
        self._folder = run
        self._client: MlflowClient | None = None
        self._run_id = ""
        self._status = "FAILED"  # until the job reports how it ended
        self._time_ms = 0  # time of the newest event

    def __call__(self, event: Event) -> None:
        self._time_ms = int(event.time * 1000)
        if self._client is None:
            self._client = _connect(self._folder)
            self._run_id = self._continue(self._client, event) or self._create(self._client)
        self._metrics = metric_names(event, self._metrics)
        numbers = scalars(event, self._metrics)
        if numbers:
            from mlflow.entities import Metric

            metrics = [
                Metric(tag, number, self._time_ms, event.step) for tag, number in numbers.items()
            ]
            self._client.log_batch(self._run_id, metrics=metrics, synchronous=True)
        self._status = STATUS.get(event.kind, self._status)

    def close(self) -> None:
        if self._client is not None:
            self._client.set_terminated(self._run_id, self._status, self._time_ms)

    def _continue(self, client: MlflowClient, first: Event) -> str:
        """Sets the status of the job's run to RUNNING and returns its id; empty if there is no run,
        or if the server does not know it."""
        from mlflow.exceptions import MlflowException

        run_id = load_run_id(self._folder / "mlflow_run.json", first)
        if run_id is None:
            return ""
        try:
            run = client.get_run(run_id)
        except MlflowException as error:
            if error.error_code != "RESOURCE_DOES_NOT_EXIST":
                raise
            return ""
        client.update_run(run_id, status="RUNNING")
        self._log_config(client, run)
        return run_id

    def _create(self, client: MlflowClient) -> str:
        run = client.create_run(
            _experiment(client), start_time=self._time_ms, run_name=self._folder.name
        )
        self._log_config(client, run)
        save_run_id(self._folder / "mlflow_run.json", run.info.run_id)
        return str(run.info.run_id)

    def _log_config(self, client: MlflowClient, run: Run) -> None:
        """Logs the configuration. Parameters of a run cannot change, so a different value in a
        resumed job becomes a tag, "resumed.batch.size"."""
        from mlflow.entities import Param, RunTag
        from mlflow.utils.validation import (
            MAX_ENTITY_KEY_LENGTH,
            MAX_PARAM_VAL_LENGTH,
            MAX_PARAMS_TAGS_PER_BATCH,
        )

        values = {
            key[: MAX_ENTITY_KEY_LENGTH - 10]: value[:MAX_PARAM_VAL_LENGTH]
            for key, value in flat_config(self._config).items()
        }
        old = run.data.params
        new = [Param(key, value) for key, value in values.items() if key not in old]
        changed = [
            RunTag(f"resumed.{key}", value)
            for key, value in values.items()
            if old.get(key, value) != value
        ]
        for first in range(
            0, max(len(new), len(changed)), MAX_PARAMS_TAGS_PER_BATCH // 2
        ):  # the limit is on both together
            some = slice(first, first + MAX_PARAMS_TAGS_PER_BATCH // 2)
            client.log_batch(
                run.info.run_id, params=new[some], tags=changed[some], synchronous=True
            )


def _connect(run: Path) -> MlflowClient:
    """Returns a client, because MLflow's fluent functions are bound to the thread that started a
    run and change state that user code sees."""
    # read at the import; otherwise MLflow reports each use to its vendor
    os.environ.setdefault("MLFLOW_DISABLE_TELEMETRY", "true")
    uri = os.environ.get("MLFLOW_TRACKING_URI")
    if not uri:
        # Files, for which MLflow needs the variable below. SQLite needs sqlalchemy and alembic,
        # which mlflow-skinny lacks, takes 1.8 s to create its tables and 8 ms instead of 2 for an
        # event, and locks its file, which network file systems do badly.
        os.environ.setdefault("MLFLOW_ALLOW_FILE_STORE", "true")
        with Folder.make(run, "mlflow") as folder:
            folder.refuse_links()
        uri = (run / "mlflow").as_uri()
    from mlflow.tracking import MlflowClient

    return MlflowClient(tracking_uri=uri)


def _experiment(client: MlflowClient) -> str:
    from mlflow.exceptions import MlflowException

    name = os.environ.get("MLFLOW_EXPERIMENT_NAME") or "hvdtrain"
    found = client.get_experiment_by_name(name)
    if found is None:
        try:
            return str(client.create_experiment(name))
        except MlflowException:  # another job created it meanwhile
            found = client.get_experiment_by_name(name)
            if found is None:
                raise
    return str(found.experiment_id)
