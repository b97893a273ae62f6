"""The report of a custom loop: its keys, its model, and what it logs."""

from __future__ import annotations

import html
import re
from pathlib import Path

import numpy as np
import torch
import yaml

import hvdtrain as ht
from hvdtrain.__main__ import main

X = np.arange(40, dtype=np.float64).reshape(20, 2)
DATA = {"x": X, "y": X.sum(1)}


def test_a_report_of_a_custom_loop(tmp_path: Path) -> None:
    run = tmp_path / "run"
    with ht.init(f"run={run}", "log.every_steps=1") as ctx:
        model = torch.nn.Linear(2, 1).double()
        model, optimizer = ctx.prepare(model, torch.optim.SGD(model.parameters(), lr=1e-3))
        for batch in ctx.samples(DATA, batch=4, epochs=1):
            loss = torch.nn.functional.mse_loss(model(batch["x"])[:, 0], batch["y"])
            ctx.backward(loss)
            optimizer.step()
            ctx.log(loss=loss, other=float(batch.step))
    assert main(["report", str(run)]) == 0
    page = html.unescape((run / "report.html").read_text())
    assert "done: its samples are over" in page and "Linear, 3 parameters" in page
    assert yaml.safe_load((run / "config.yaml").read_text())["batch"] == {"size": 4}
    assert "log.every_steps" in page and "model.name" not in page  # the keys of a custom loop only
    names = ["report-logged.png", "report-loss.png", "report-rates.png", "report-throughput.png"]
    assert sorted(path.name for path in run.glob("*.png")) == names
    table = page[page.index("Logged by the script") :]
    assert re.search(r">other<.*?>4<.*?>0<.*?>4<", table, re.DOTALL), "last, least and most"
