"""The keys parallel.pipeline, schedule, virtual, micro_batches and balance."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar, Literal, Self

from pydantic import Field, PositiveInt, field_validator

from hvdtrain.config.sections.section import Owners, Section

if TYPE_CHECKING:  # the section that has these keys: super() is its class
    from hvdtrain.config.sections.parallel import ParallelConfig as Parallel
else:
    Parallel = Section


class PipelineKeys(Parallel):
    """How the layers of a model are divided into the stages of a pipeline."""

    section = "parallel"
    behind = "dense_updates"
    dividing = ("parallel.pipeline",)
    owners: ClassVar[Owners] = {
        f"parallel.{name}": ("parallel.pipeline", 1)
        for name in ("schedule", "virtual", "micro_batches", "balance")
    }
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
    def axes(self) -> dict[str, int]:
        return {**super().axes, "pipeline": self.pipeline}

    @property
    def pipe_ranks(self) -> int:
        return self.pipeline

    @property
    def stages_of_rank(self) -> int:
        return self.virtual or (2 if self.schedule == "interleaved" else 1)

    @property
    def more_passes(self) -> int:
        if not self.has_stages:
            return super().more_passes
        return self.micro_batches or 2 * self.pipeline

    def with_one_pass(self) -> Self:
        return self.replace(pipeline=1)

    @property
    def needed_of_engine(self) -> frozenset[str]:
        needed = super().needed_of_engine
        return needed | {"p2p"} if self.has_stages else needed

    @property
    def highest_stage(self) -> int:
        return 2 if self.has_stages else super().highest_stage

    @property
    def may_recompute(self) -> bool:
        return super().may_recompute and self.schedule != "zero_bubble"


KEYS = (PipelineKeys,)
