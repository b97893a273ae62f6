"""A report shows no logins and no secrets."""

from __future__ import annotations

import json
from pathlib import Path

from hvdtrain.events.redaction import HIDDEN
from hvdtrain.extras.report.page import render_page
from hvdtrain.extras.report.page_tables import differing, settings
from hvdtrain.records.run import read_run


def test_a_report_shows_reasons_without_logins(tmp_path: Path) -> None:
    why = "RuntimeError: cannot reach https://joe:hunter2@hub.example/x"
    kinds = ("start", "checkpoint_failed", "failed")
    events = [
        {"time": 1, "kind": kind, "step": 0} | ({} if kind == "start" else {"reason": why})
        for kind in kinds
    ]
    (tmp_path / "events.jsonl").write_text("".join(json.dumps(event) + "\n" for event in events))
    record = read_run(tmp_path)
    assert record.ending == f"failed: RuntimeError: cannot reach https://{HIDDEN}@hub.example/x"
    text = render_page([record], ["a"], [], "command")
    # lead, ending, warning, two events
    assert "hunter2" not in text and text.count(f"https://{HIDDEN}@hub.example/x") == 5


def test_a_report_shows_no_secret(tmp_path: Path) -> None:
    for name in ("one", "two"):
        run = tmp_path / name
        run.mkdir()
        (run / "events.jsonl").write_text('{"time": 1, "kind": "start", "step": 0}\n')
        (run / "config.yaml").write_text(
            f"model:\n  hub_token: hf_{name}\n  name: mlp\ndata:\n  root: "
            f"https://joe:{name}@host/x\n"
        )
    records = [read_run(tmp_path / name) for name in ("one", "two")]
    rows = dict(settings(records[0]).rows)
    assert (rows["model.hub_token"], rows["data.root"], rows["model.name"]) == (
        HIDDEN,
        f"https://{HIDDEN}@host/x",
        "mlp",
    )
    keys = [
        (key, [record.config[key] for record in records])
        for key in ("model.hub_token", "data.root")
    ]
    assert [row[1:] for row in differing(keys, ["one", "two"]).rows] == [
        [HIDDEN] * 2,
        [f"https://{HIDDEN}@host/x"] * 2,
    ]
