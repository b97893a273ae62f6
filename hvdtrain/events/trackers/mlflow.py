"""MLflow: parameters, the numbers of each event, and how the job ended, on a tracking server or in RUN/mlflow."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING

from hvdtrain.config.schema import Config
from hvdtrain.events.log import Event
from hvdtrain.events.scalars import scalars
from hvdtrain.events.trackers.run_id import former, keep
from hvdtrain.events.trackers.settings import demand, texts

if TYPE_CHECKING:
    from mlflow.entities import Run
    from mlflow.tracking import MlflowClient

STATUS = {"end": "FINISHED", "stop": "KILLED"}  # else FAILED


def build(config: Config, run: Path) -> Mlflow:
    """MLFLOW_TRACKING_URI and MLFLOW_EXPERIMENT_NAME win. Nothing is imported before the first event.

    Show a run folder's own with: MLFLOW_ALLOW_FILE_STORE=true mlflow ui --backend-store-uri RUN/mlflow
    """
    demand("mlflow", "mlflow")
    return Mlflow(config, run.resolve())


class Mlflow:
    """One MLflow run for a job, however often it is resumed; steps that are done twice have two values."""

    def __init__(self, config: Config, run: Path) -> None:
        self._config, self._run = config, run
        self._client: MlflowClient | None = None
        self._id, self._status, self._now_ms = "", "FAILED", 0

    def __call__(self, event: Event) -> None:
        self._now_ms = int(event.time * 1000)
        if self._client is None:
            self._client = _connect(self._run)
            self._id = self._go_on(self._client, event) or self._begin(self._client)
        numbers = scalars(event)
        if numbers:
            from mlflow.entities import Metric

            metrics = [Metric(tag, number, self._now_ms, event.step) for tag, number in numbers.items()]
            self._client.log_batch(self._id, metrics=metrics, synchronous=True)
        self._status = STATUS.get(event.kind, self._status)

    def close(self) -> None:
        if self._client is not None:
            self._client.set_terminated(self._id, self._status, self._now_ms)

    def _go_on(self, client: MlflowClient, first: Event) -> str:
        """The id of the former run, running again; empty where there is none, or the server does not know it."""
        from mlflow.exceptions import MlflowException

        run_id = former(self._run / "mlflow_run.json", first)
        if run_id is None:
            return ""
        try:
            found = client.get_run(run_id)
        except MlflowException as error:
            if error.error_code != "RESOURCE_DOES_NOT_EXIST":
                raise
            return ""
        client.update_run(run_id, status="RUNNING")
        self._log_settings(client, found)
        return run_id

    def _begin(self, client: MlflowClient) -> str:
        made = client.create_run(_experiment(client), start_time=self._now_ms, run_name=self._run.name)
        self._log_settings(client, made)
        keep(self._run / "mlflow_run.json", made.info.run_id)
        return str(made.info.run_id)

    def _log_settings(self, client: MlflowClient, run: Run) -> None:
        """Parameters of a run cannot change, so what a resumed job was told anew is a tag: "resumed.batch.size"."""
        from mlflow.entities import Param, RunTag
        from mlflow.utils.validation import MAX_ENTITY_KEY_LENGTH, MAX_PARAM_VAL_LENGTH, MAX_PARAMS_TAGS_PER_BATCH

        cut = {key[: MAX_ENTITY_KEY_LENGTH - 10]: value[:MAX_PARAM_VAL_LENGTH] for key, value in texts(self._config).items()}
        old = run.data.params
        new = [Param(key, value) for key, value in cut.items() if key not in old]
        changed = [RunTag(f"resumed.{key}", value) for key, value in cut.items() if old.get(key, value) != value]
        for first in range(0, max(len(new), len(changed)), MAX_PARAMS_TAGS_PER_BATCH // 2):  # the limit is on both together
            part = slice(first, first + MAX_PARAMS_TAGS_PER_BATCH // 2)
            client.log_batch(run.info.run_id, params=new[part], tags=changed[part], synchronous=True)


def _connect(run: Path) -> MlflowClient:
    """The client, not the fluent functions: they belong to the thread that started a run, and change what the user's own code sees."""
    os.environ.setdefault("MLFLOW_DISABLE_TELEMETRY", "true")  # read at the import: it would tell MLflow's makers of each use
    uri = os.environ.get("MLFLOW_TRACKING_URI")
    if not uri:
        # Files, though MLflow wants to be asked for them: sqlite needs sqlalchemy and alembic, which mlflow-skinny leaves out, takes
        # 1.8 s to make its tables and 8 ms instead of 2 for each event, and locks its file, which network disks do badly.
        os.environ.setdefault("MLFLOW_ALLOW_FILE_STORE", "true")
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
        except MlflowException:  # another job made it in this moment
            found = client.get_experiment_by_name(name)
            if found is None:
                raise
    return str(found.experiment_id)
