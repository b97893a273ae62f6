"""Checks before the first step that every rank runs the same job: versions, code, environment,
configuration and data."""

from __future__ import annotations

import hashlib
import os
import socket
from typing import Any

from hvdtrain.comm.communicator import Communicator
from hvdtrain.config.schema import Config
from hvdtrain.errors import UserError, short
from hvdtrain.events import redaction
from hvdtrain.training.replicas import software
from hvdtrain.training.replicas.compare import describe_minority
from hvdtrain.training.replicas.user_code import module_digests, named_modules, object_digests

Facts = dict[str, dict[str, Any]]  # kind, a key of software.FIXES -> name of a fact -> its value


def facts(config: Config, data: dict[str, Any], engine: str) -> Facts:
    """Returns the facts that must be equal on all ranks, by kind and by their names in messages.
    Reads no clock and communicates with no rank.

    data: the facts of that kind.
    """
    packages = {
        "numpy": None,
        **dict.fromkeys((*software.USED_BY[config.framework], *software.USED_BY[engine])),
    }
    modules = module_digests(named_modules(config))
    return {
        "versions": {
            f"the version of {name}": version
            for name, version in software.versions(packages).items()
        },
        "code": {"hvdtrain's code": software.digest(software.code_digests())}
        | {f"the code of {module}": code for module, code in modules.items()},
        "objects": object_digests(config),
        "environment": software.variables(os.environ),
        "configuration": by_key(config),
        "data": data,
    }


def by_key(config: Config) -> dict[str, Any]:
    """Returns "batch.size" -> 64 and so on, for every key of the configuration."""
    values: dict[str, Any] = {}
    for name, value in config.model_dump().items():
        values |= (
            {f"{name}.{key}": inner for key, inner in value.items()}
            if isinstance(value, dict)
            else {name: value}
        )
    return values


def check_same_facts(communicator: Communicator, facts: Facts) -> None:
    """Compares the facts of all ranks, by their digests. A collective; raises the same UserError on
    all ranks if one differs."""
    if len(set(communicator.allgather_object(_digest(facts)))) == 1:
        return
    of_all = communicator.allgather_object((socket.gethostname(), facts))
    hosts = [host for host, _ in of_all]
    first: tuple[str, str, list[str | None]] | None = None
    others = 0
    for kind in facts:
        for name in dict.fromkeys(name for _, theirs in of_all for name in theirs.get(kind, {})):
            values = [_text(theirs, kind, name) for _, theirs in of_all]
            if len(set(values)) > 1:
                others += first is not None
                first = first or (kind, name, values)
    if first is None:
        return
    kind, name, values = first
    minority = describe_minority(values, hosts)
    more = f"; {others} more differ" if others else ""
    what = (
        f"{name} differs between ranks: {_shown(name, minority.usual)} on rank "
        f"{minority.majority[0]}, "
    )
    raise UserError(
        f"{what}{_shown(name, minority.value)} on rank {minority.ranks[0]}{more}",
        minority.where,
        software.FIXES[kind],
    )


def _digest(facts: Facts) -> str:
    """Returns a digest of the facts, equal if _text() is equal for every kind and name."""
    texts = {
        (kind, name): _text(facts, kind, name)
        for kind, of_kind in facts.items()
        for name in of_kind
    }
    known = sorted((place, text) for place, text in texts.items() if text is not None)
    return hashlib.sha256(repr(known).encode()).hexdigest()


def _text(theirs: Facts, kind: str, name: str) -> str | None:
    value = theirs.get(kind, {}).get(name)
    return None if value is None else str(value)


def _shown(name: str, value: str | None) -> str:
    """Returns a value for a message; secrets of the configuration are hidden."""
    return "nothing" if value is None else short(redaction.redact({name: value})[name])
