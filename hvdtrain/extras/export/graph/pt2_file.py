"""A .pt2 file of torch.export, which torch.export.load() reads."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

import torch

from hvdtrain.extras.export.graph.traced import Run, TracedModel, called, quiet, tensors_of

FACTS = "hvdtrain.json"  # the metadata, among the extra files


class Pt2File:
    """Writes a model as .pt2."""

    tolerance = 1e-6

    def __init__(self, traced: TracedModel, fields: Mapping[str, str]) -> None:
        self._traced = traced
        self._fields = fields

    def write(self, path: Path) -> None:
        facts = {FACTS: json.dumps(self._fields)}
        try:
            with quiet():
                torch.export.save(self._traced.program, path, extra_files=facts)
        except OSError:
            raise
        except Exception as error:
            raise self._traced.refusal("torch.export cannot save the model", error) from None

    def read_back(self, path: Path) -> Run:
        with quiet():
            model = torch.export.load(path).module()
        return lambda inputs: tensors_of(called(model, inputs))

    def how_to_load(self, to: Path) -> list[str]:
        inputs = self._traced.compared[0]
        arguments = [*self._traced.inputs][: len(inputs.positional)]
        arguments += [f"{name}={name}" for name in inputs.named]
        path = json.dumps(str(to))
        return [
            f"load it  import torch; model = torch.export.load({path}).module()",
            f"         outputs = model({', '.join(arguments)})",
            f"metadata files = {{'{FACTS}': ''}}; torch.export.load({path}, extra_files=files)",
        ]
