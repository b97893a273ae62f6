"""Connected ranks inspect themselves, then compare what they found; the result is one report."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TypeVar

from hvdtrain.cli.check import dry_run
from hvdtrain.cli.check.differences import differing_code, differing_configuration, find_differences
from hvdtrain.cli.check.dry_run import RunFolderFacts
from hvdtrain.cli.check.findings import Finding, count_by_level, describe_rank, finding_of_error, most_severe_first
from hvdtrain.cli.check.rank_facts import RankFacts, apart_from, completed, local_facts, network_variables
from hvdtrain.cli.check.report import Report
from hvdtrain.cli.check.shared_resources import find_shortages, full_mesh
from hvdtrain.cli.check.speed import measure_speeds, read_clocks, slow_engine
from hvdtrain.cli.check.time_limit import TimeLimit
from hvdtrain.comm.communicator import Communicator
from hvdtrain.comm.placement import Placement
from hvdtrain.config.schema import Config
from hvdtrain.errors import Diverged
from hvdtrain.training.replicas.software import code_digests, digest
from hvdtrain.training.replicas.user_code import module_digests, named_modules

T = TypeVar("T")


@dataclass
class RankInspection:
    """What a rank finds out about itself."""

    facts: RankFacts
    findings: list[Finding] = field(default_factory=list)

    def attempt(self, action: Callable[[], T]) -> T | None:
        """The action's result; where it raises, the error becomes a finding and the result is None.

        The action must call no collective: where it raised on one rank only, the other ranks would wait.
        """
        try:
            return action()
        except Exception as error:
            self.findings.append(finding_of_error(error, describe_rank(self.facts)))
            return None


def connected_facts(place: Placement, communicator: Communicator) -> RankFacts:
    """The facts of a rank, numbered as the engine numbers it."""
    facts = local_facts(place, os.environ)
    facts["rank"] = communicator.rank
    facts["size"] = communicator.size
    facts["local_rank"] = communicator.local_rank
    facts["local_size"] = communicator.local_size
    facts["engine"] = communicator.name
    facts["network_variables"] = network_variables(os.environ)  # the engine may have set one
    return facts


def inspect_job(rank: RankInspection, config: Config, communicator: Communicator) -> RunFolderFacts | None:
    """Tries this rank's part of the job. Returns the run folder on rank 0, None on the others. No collective is inside."""
    from hvdtrain.training.conflicts import refuse_conflicts

    if communicator.rank == 0:
        rank.attempt(lambda: refuse_conflicts(config, communicator.name, communicator.size))
    rank.facts["config"] = digest(values_by_key(config))
    rank.facts["modules"] = module_digests(named_modules(config))
    rank.facts["libraries"] = dry_run.load_libraries(communicator)
    rank.facts["data"] = rank.attempt(lambda: dry_run.read_data(config))
    rank.facts["device"] = rank.attempt(lambda: dry_run.pick_device(config, communicator))
    if communicator.local_rank == 0:
        rank.findings += rank.attempt(lambda: dry_run.try_cache_folder(rank.facts["host"])) or []
    if communicator.rank != 0:
        return None
    run_folder = rank.attempt(lambda: dry_run.try_run_folder(config))
    if run_folder is None:
        return None
    rank.findings += run_folder.findings
    return run_folder.facts


def compare_ranks(
    rank: RankInspection,
    config: Config,
    run_folder: RunFolderFacts | None,
    communicator: Communicator,
    engine_reason: str,
    place: Placement,
    time_limit: TimeLimit,
) -> Report:
    """Brings the facts and findings of all ranks together and compares them. Every rank calls it and gets the whole report."""
    time_limit.start_waiting("to compare")
    speeds = measure_speeds(communicator, rank.facts, place)
    rank.facts["clock_s"] = read_clocks(communicator)[communicator.rank]
    first = communicator.broadcast_object(rank.facts)
    gathered = communicator.allgather_object((apart_from(first, rank.facts), [tuple(finding) for finding in rank.findings]))
    ranks = [completed(first, sent) for sent, _ in gathered]
    findings = [Finding(*finding) for _, rank_findings in gathered for finding in rank_findings]
    findings += _compare_code_and_configuration(communicator, config, ranks)
    findings += [*find_differences(ranks), *find_shortages(ranks), *slow_engine(communicator.name, speeds)]
    findings += full_mesh(communicator.name, communicator.size)
    if communicator.size > 1 and not count_by_level(findings)["error"]:
        time_limit.start_work("comparing the outputs of the model")
        findings += _compare_outputs(communicator, config, ranks)
    return Report(ranks, f"{communicator.name}: {engine_reason}", run_folder, speeds, most_severe_first(findings))


def _compare_code_and_configuration(communicator: Communicator, config: Config, ranks: Sequence[RankFacts]) -> list[Finding]:
    """File by file and key by key, but only where the digests differ. Every rank calls it, with the same `ranks`."""
    findings: list[Finding] = []
    if len({facts["code"] for facts in ranks}) > 1:
        digests = [facts["code"] for facts in ranks]
        findings += differing_code(ranks, _of_each_kind(communicator, digests, code_digests()))
    if len({facts["config"] for facts in ranks}) > 1:
        digests = [facts["config"] for facts in ranks]
        findings += differing_configuration(ranks, _of_each_kind(communicator, digests, values_by_key(config)))
    return findings


def _of_each_kind(communicator: Communicator, digests: Sequence[str], own: dict[str, str]) -> list[dict[str, str]]:
    """What each rank has, of which the first rank with each digest alone sends: 27 kB of the code of each rank are 221 MB of 8,192."""
    firsts = {digest: rank for rank, digest in reversed(list(enumerate(digests)))}
    sent = communicator.allgather_object(own if firsts[digests[communicator.rank]] == communicator.rank else None)
    return [sent[firsts[digest]] for digest in digests]


def _compare_outputs(communicator: Communicator, config: Config, ranks: Sequence[RankFacts]) -> list[Finding]:
    """The model of each rank, with the same weights, for one fixed batch: the same findings on all ranks. Every rank calls it."""
    from hvdtrain.frameworks.learner import Learner
    from hvdtrain.training.build import build_learner
    from hvdtrain.training.build_task import restore_task
    from hvdtrain.training.datasets import facts_of_task
    from hvdtrain.training.replicas.broadcast import broadcast_state
    from hvdtrain.training.replicas.probe import Probe

    facts = ranks[communicator.rank]
    data = facts["data"]
    assert data is not None, "an error was found before"
    task = restore_task(config, facts_of_task(data))
    learner: Learner | None = None
    failure: Finding | None = None
    try:
        learner = build_learner(config, task, communicator)
    except Exception as error:
        failure = finding_of_error(error, describe_rank(facts))
    failures = [Finding(*found) for found in communicator.allgather_object(failure and tuple(failure)) if found]
    if failures or learner is None:
        return failures
    broadcast_state(communicator, learner, None)
    try:
        Probe(config, task).compare(communicator, learner, [rank["host"] for rank in ranks], "before the first step")
    except Diverged as error:
        return [Finding("error", error.what, error.where, error.fix)]
    return []


def values_by_key(config: Config) -> dict[str, str]:
    """ "batch.size" -> "64", for every key of the configuration."""
    values: dict[str, str] = {}
    for name, value in config.model_dump().items():
        if isinstance(value, dict):
            values |= {f"{name}.{key}": str(inner) for key, inner in value.items()}
        else:
            values[name] = str(value)
    return values
