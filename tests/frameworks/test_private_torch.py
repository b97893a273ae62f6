"""Every private name of torch that hvdtrain uses is in this torch, and in this list."""

from __future__ import annotations

import ast
import functools
import importlib
from pathlib import Path
from typing import Any

import pytest
import torch
from ranks import needs_extra

ROOT = Path(__file__).parents[2] / "hvdtrain"
# name -> what hvdtrain cannot do without it
PRIVATE = {
    **dict.fromkeys(
        [
            f"torch._foreach_{operation}"
            for operation in (
                "add_",
                "addcmul_",
                "copy_",
                "div",
                "mul_",
                "norm",
                "sqrt",
            )
        ],
        "update, scale or copy many tensors in one call",
    ),
    **dict.fromkeys(
        [
            f"torch._subclasses.fake_tensor.{name}"
            for name in ("FakeTensor", "FakeTensorMode", "unset_fake_temporarily")
        ],
        "count memory and layers without computing",
    ),
    **dict.fromkeys(
        [
            "torch.utils._python_dispatch.TorchDispatchMode",
            "torch.utils._pytree.tree_leaves",
            "torch.utils._pytree.tree_map",
            "torch.UntypedStorage._cdata",
            "torch.ops.aten._local_scalar_dense",
            "torch.ops.aten._to_copy",
            "torch.ops.aten._unsafe_view",
        ],
        "see each operation: memory, costs, deferred models, types of gathered weights",
    ),
    **dict.fromkeys(
        [
            "torch.ops.aten._scaled_dot_product_flash_attention_for_cpu",
            "torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward",
        ],
        "count the operations of attention",
    ),
    # frameworks/torch/foreign is below private_api.py
    "torch._subclasses.FakeTensor": "count the elements of a foreign model",
    "torch.nn.modules.batchnorm._BatchNorm": "find and replace batch norms",
    "torch._C._current_graph_task_id": "know that a forward pass is made again in backward",
    "torch.cpu._is_avx512_bf16_supported": "choose bfloat16 on a processor",
    "torch.cpu._is_amx_tile_supported": "choose bfloat16 on a processor",
    "torch._dynamo": "import before the first step what recomputation needs",
    **dict.fromkeys(
        [
            f"torch.distributed.distributed_c10d.{name}"
            for name in ("_get_default_store", "_set_pg_timeout", "_world")
        ],
        "form a new process group after the loss of a rank",
    ),
    **dict.fromkeys(
        [
            f"torch.distributed.fsdp._fully_shard._fsdp_collectives.{name}"
            for name in ("DefaultAllGather", "DefaultReduceScatter")
        ],
        "gather and reduce FSDP2's weights",
    ),
    **dict.fromkeys(
        [
            f"torch.distributed.pipelining._backward.{name}"
            for name in ("stage_backward_input", "stage_backward_weight")
        ],
        "split backward passes in a zero-bubble schedule",
    ),
    "torch.distributed._Work": "give torch.distributed a backend of MPI",
    "torch.Tensor._base": "find views",
    "torch.Tensor._values": "look at sparse gradients",
    "torch.Tensor._version": "find buffers that a pass changes",
    "torch.Tensor._backward_hooks": "refuse hooks that would not run",
    "torch.distributed.fsdp.FSDPModule._get_fsdp_state": "reach the gathered weights of FSDP2",
}


def find(name: str) -> Any:
    """Modules are imported; a name may be an attribute of a class."""
    module, *rest = name.split(".")
    found: Any = importlib.import_module(module)
    for part in rest:
        module = f"{module}.{part}"
        if not hasattr(found, part):
            importlib.import_module(module)
        found = getattr(found, part)
    return found


@pytest.mark.parametrize("name", PRIVATE)
def test_this_torch_has_the_private_name(name: str) -> None:
    try:
        find(name)
    except (ImportError, AttributeError) as error:
        pytest.fail(
            f"torch {torch.__version__} lacks {name}, without which hvdtrain cannot "
            f"{PRIVATE[name]}: {error}"
        )


def private_names(source: str) -> set[str]:
    """Dotted names that begin with torch and have a private part, as long as they stand there."""
    found = set()
    aliases = {"torch": "torch", "dist": "torch.distributed", "_aten": "torch.ops.aten"}
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "torch":
            found |= {f"{node.module}.{alias.name}" for alias in node.names}
        elif isinstance(node, ast.Import):
            found |= {each.name for each in node.names if each.name.startswith("torch.")}
        elif isinstance(node, ast.Attribute):
            parts = []
            inner: ast.expr = node
            while isinstance(inner, ast.Attribute):
                parts.append(inner.attr)
                inner = inner.value
            if isinstance(inner, ast.Name) and inner.id in aliases and parts[0].startswith("_"):
                found.add(".".join([aliases[inner.id], *reversed(parts)]))
    return {
        name
        for name in found
        if any(part.startswith("_") and not part.startswith("__") for part in name.split("."))
        and not any(other.startswith(f"{name}.") for other in found)
    }


@functools.cache
def used() -> dict[str, list[str]]:
    """private name -> files"""
    found: dict[str, list[str]] = {}
    for path in sorted(ROOT.rglob("*.py")):
        for name in private_names(path.read_text()):
            found.setdefault(name, []).append(str(path.relative_to(ROOT)))
    return found


def test_no_private_name_is_used_that_is_not_listed() -> None:
    unknown = {name: files for name, files in used().items() if name not in PRIVATE}
    assert unknown == {}, "a public name of torch; else list it in PRIVATE"


@needs_extra("fully_sharded")
@needs_extra("pipeline")
def test_every_listed_name_of_a_module_is_used() -> None:
    of_classes = {name for name in PRIVATE if name.split(".")[-2][:1].isupper()}
    assert set(PRIVATE) - of_classes - set(used()) == set()


def test_private_modules_are_imported_in_one_place_or_by_the_one_file_that_needs_them() -> None:
    shared = {
        name: files
        for name, files in used().items()
        if len(files) > 1 and not name.startswith(("torch._foreach_", "torch.ops.", "torch.nn."))
    }
    assert shared == {}, "import it from hvdtrain.frameworks.torch.private_api"
