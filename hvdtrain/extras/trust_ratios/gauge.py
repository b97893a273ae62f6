"""The gauge of log.trust_ratios: reads the ratios of the last step at every sync point."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from hvdtrain.comm.communicator import Communicator
from hvdtrain.config.schema import Config
from hvdtrain.core.metrics import Sums
from hvdtrain.events.log import Log
from hvdtrain.frameworks.torch.learner import TorchLearner
from hvdtrain.frameworks.torch.optim.rule_optimizer import RuleOptimizer
from hvdtrain.training.telemetry.gauge import Gauge


class TrustRatioGauge(Gauge):
    """Emits the event "trust_ratios" with the factor of each layer's learning rate."""

    def __init__(
        self, communicator: Communicator, learner: TorchLearner, log: Log, step: int
    ) -> None:
        self._communicator = communicator
        self._learner = learner
        self._log = log
        self._step = step
        assert isinstance(learner.optimizer, RuleOptimizer), type(learner.optimizer)
        self._optimizer = learner.optimizer
        self._optimizer.keep_trust_ratios()
        self._names: dict[Any, str] = {
            learner.strategy.shard(p).parameter: name
            for name, p in learner.model.named_parameters()
            if p.requires_grad
        }

    def fields(self, sums: Sums, steps: int) -> dict[str, Any]:
        """Emits the event; a layer that several ranks have is the lowest rank's."""
        self._step += steps
        found: dict[str, float] = {}
        for of_rank in reversed(self._communicator.allgather_object(self._own())):
            found.update(of_rank)
        if found:
            self._log.emit("trust_ratios", self._step, ratios=dict(sorted(found.items())))
        return {}

    def _own(self) -> dict[str, float]:
        """Returns {name of a parameter: ratio} of this rank's last step."""
        return {
            self._names[p]: ratio
            for parameters, ratios in self._optimizer.trust_ratios
            for p, ratio in zip(parameters, ratios.tolist(), strict=True)
        }

    def from_step(self, step: int) -> TrustRatioGauge:
        return TrustRatioGauge(self._communicator, self._learner, self._log, step)


def trust_ratio_gauge(
    config: Config,
    communicator: Communicator,
    learner: TorchLearner,
    log: Log,
    run: Path | None,
    step: int,
) -> TrustRatioGauge:
    return TrustRatioGauge(communicator, learner, log, step)
