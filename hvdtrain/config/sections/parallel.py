"""The section parallel: how the layers of one model are divided among ranks."""

from __future__ import annotations

from typing import Any, ClassVar, Literal

from pydantic import Field, PositiveInt, field_validator

from hvdtrain.config.sections.extra_keys import with_keys_of_extras
from hvdtrain.config.sections.section import Owners, Section


@with_keys_of_extras
class ParallelConfig(Section):
    """How the layers of one model are divided among ranks; the rest of the ranks is data
    parallel."""

    section = "parallel"
    dividing: ClassVar[tuple[str, ...]] = ("parallel.pipeline", "parallel.tensor")
    owners: ClassVar[Owners] = {
        "parallel.sequence": ("parallel.tensor", 1),
        **{
            f"parallel.{name}": ("parallel.pipeline", 1)
            for name in ("schedule", "virtual", "micro_batches", "balance")
        },
    }
    tensor: int = Field(
        default=1,
        ge=1,
        le=10**6,
        description="number of ranks that compute each layer together, each with part of its "
        "neurons and attention heads (Shoeybi 2019, arXiv:1909.08053). These "
        "ranks read the same samples and exchange activations in every layer, so "
        "keep them within a host. For models with a tensor plan: gpt, mlp",
    )
    sequence: bool = Field(
        default=False,
        description="with parallel.tensor: in norms, dropout and residual connections each "
        "rank computes only its part of the positions, instead of all of them "
        "(sequence parallelism: Korthikanti 2022, arXiv:2205.05198); needs less "
        "memory for activations, same results. For models whose plan supports it: "
        "gpt",
    )
    pipeline: int = Field(
        default=1,
        ge=1,
        le=10**6,
        description="number of ranks of a pipeline: each has some of the model's layers, as a "
        "stage, or several stages with parallel.schedule=interleaved; the "
        "micro-batches of a step pass through the stages. These ranks read the same "
        "samples. For gpt, mlp, torch.nn.Sequential and models with "
        "pipeline_units() (framework=torch)",
    )
    schedule: Literal["gpipe", "1f1b", "interleaved", "zero_bubble"] = Field(
        default="1f1b",
        description="order of the forward and backward passes of a pipeline; gpipe: all "
        "forward, then all backward (Huang 2019, arXiv:1811.06965); 1f1b: "
        "backward as early as possible, with fewer activations in memory "
        "(Narayanan 2019, arXiv:1806.03377); interleaved: several stages on each "
        "rank (Narayanan 2021, arXiv:2104.04473); zero_bubble: weight gradients "
        "fill the gaps (Qi 2023, arXiv:2401.10241)",
    )
    virtual: int | None = Field(
        default=None,
        ge=1,
        le=1000,
        description="stages per rank with parallel.schedule=interleaved; default: 2, or 1 "
        "with other schedules",
    )
    micro_batches: int | None = Field(
        default=None,
        ge=1,
        le=10**6,
        description="micro-batches per step of a pipeline; default: 2 x parallel.pipeline, or "
        "as many as batch.micro implies",
    )
    balance: Literal["operations", "seconds"] | list[PositiveInt] = Field(
        default="operations",
        description="how a pipeline divides the model so that the slowest stage is as fast as "
        "possible; operations: by the floating-point operations of each unit, the "
        "same in every run; seconds: by the time of each unit, measured by rank 0 "
        "at the start; [3, 2]: by the number of units in each stage. `hvdtrain "
        "plan --pipeline` shows all three",
    )

    @field_validator("balance", mode="before")
    @classmethod
    def _as_on_the_command_line(cls, balance: Any) -> Any:
        """Converts 3,2 on the command line to [3, 2], and 3 to [3]."""
        if isinstance(balance, str) and all(
            part.strip().isdecimal() for part in balance.split(",")
        ):
            balance = [int(part) for part in balance.split(",")]
        elif type(balance) is int:
            balance = [balance]
        is_list = (
            isinstance(balance, list)
            and balance
            and all(type(units) is int and units >= 1 for units in balance)
        )
        if not is_list and balance not in ("operations", "seconds"):
            raise ValueError(
                "parallel.balance takes operations, seconds, or the units of each stage, each 1 "
                "or more, as in 3,2"
            )
        return balance

    @property
    def ranks(self) -> int:
        """The number of ranks that share one model and read the same samples."""
        return self.tensor * self.pipeline

    @property
    def stages_of_rank(self) -> int:
        return self.virtual or (2 if self.schedule == "interleaved" else 1)

    @property
    def has_stages(self) -> bool:
        """Whether each rank has only some of the layers."""
        return self.pipeline > 1

    @property
    def more_passes(self) -> int:
        """By how much a step is divided into more passes, so that the ranks of a pipeline wait
        less."""
        return (self.micro_batches or 2 * self.pipeline) if self.has_stages else 1

    def readers_of(self, ranks: int) -> int:
        return ranks // self.ranks

    @property
    def needed_of_engine(self) -> frozenset[str]:
        return frozenset({"p2p"} if self.has_stages else ())

    def summary(self) -> str:
        """Returns the settings, for people: parallel.tensor=2, or parallel.pipeline=2 x
        parallel.tensor=2."""
        sizes = {"pipeline": self.pipeline, "tensor": self.tensor}
        return " x ".join(f"parallel.{name}={size}" for name, size in sizes.items() if size > 1)

    @property
    def cut_by(self) -> str:
        """The key that partitions layers among ranks; empty if every rank has complete layers."""
        return next((key for key in ("tensor", "pipeline") if getattr(self, key) > 1), "")

    @property
    def cuts(self) -> bool:
        """Whether parameters and optimizer state are partitioned among ranks."""
        return bool(self.cut_by)

    @property
    def highest_stage(self) -> int:
        """The highest shard.stage that these settings support."""
        return 2 if self.has_stages else 3

    @property
    def may_recompute(self) -> bool:
        """Whether these settings support model.recompute."""
        return self.schedule != "zero_bubble"

    @property
    def may_divide_passes(self) -> bool:
        """Whether these settings support batch.micro."""
        return True
