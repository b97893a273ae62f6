"""A .onnx file, which onnxruntime and other inference engines read."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from hvdtrain.errors import UserError
from hvdtrain.extras.export.graph.traced import Run, TracedModel, quiet, tensors_of

_MOST_BYTES = 2**31 - 2**24  # of a protobuf message, without room for the graph


class OnnxFile:
    """Writes a model as .onnx, with names for its inputs and its symbolic sizes."""

    tolerance = 1e-4

    def __init__(self, traced: TracedModel, fields: Mapping[str, str]) -> None:
        self._traced = traced
        self._fields = fields

    def write(self, path: Path) -> None:
        traced = self._traced
        if traced.size_bytes > _MOST_BYTES:
            what = f"the weights have {traced.size_bytes:,} bytes, a .onnx file at most 2 GB"
            raise UserError(what, "--to", "--to model.pt2")
        try:
            with quiet():
                made: Any = torch.onnx.export(traced.program, dynamo=True, verbose=False)
            made.rename_axes(traced.axes)
            made.model.metadata_props.update(self._fields)
            made.save(str(path), external_data=False)
        except OSError:
            raise
        except Exception as error:
            raise traced.refusal("torch.onnx cannot convert the model", error) from None

    def read_back(self, path: Path) -> Run:
        import onnxruntime

        options = onnxruntime.SessionOptions()
        options.log_severity_level = 3  # errors
        session = onnxruntime.InferenceSession(
            str(path), options, providers=["CPUExecutionProvider"]
        )
        kept = {one.name for one in session.get_inputs()}
        names = [*self._traced.inputs]

        def run(inputs: Any) -> list[torch.Tensor]:
            tensors = zip(names, tensors_of(tuple(inputs)), strict=True)
            arrays = {name: tensor.numpy() for name, tensor in tensors if name in kept}
            return [torch.from_numpy(array) for array in session.run(None, arrays)]

        return run

    def how_to_load(self, to: Path) -> list[str]:
        arrays = ", ".join(f'"{name}": {name}' for name in self._traced.inputs)
        path = json.dumps(str(to))
        return [
            f"load it  import onnxruntime; model = onnxruntime.InferenceSession({path})",
            f"         outputs = model.run(None, {{{arrays}}})",
            "metadata model.get_modelmeta().custom_metadata_map",
        ]
