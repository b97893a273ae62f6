"""comm.gossip_steps: a rank exchanges weights with one neighbour after some of its local steps."""

from __future__ import annotations

from hvdtrain.config.exclusion import Exclusion, above, no_effect, other_than
from hvdtrain.extras.gossip.keys import GossipKeys
from hvdtrain.features import reduce
from hvdtrain.features.comm import not_on_horovod
from hvdtrain.features.job_feature import Conflict, JobFeature, needs_engine
from hvdtrain.features.of_extras import Added

# Local SGD is on too, and excludes what ranks with their own weights cannot do.
GOSSIP = JobFeature(
    key="comm.gossip_steps",
    on=lambda config: GossipKeys.of(config).gossip_steps > 0 and config.comm.local_steps > 1,
    updates_whole_weights=False,
    has_common_steps=False,
    arrangement="hvdtrain.extras.gossip.arrangement:Gossip",
    examples=("comm.gossip_steps=1 comm.local_steps=2",),
    off="comm.gossip_steps=0",
    why="both define how the weights of ranks are combined",
    without=(
        no_effect(
            "comm.gossip_steps",
            above(0),
            without="comm.local_steps",
            fix="comm.local_steps=100, after which all ranks average",
            when=lambda config: config.comm.local_steps == 1,
        ),
    ),
    excludes=(
        Exclusion("comm.outer_lr", other_than(1.0, 0.7)),
        Exclusion("comm.outer_momentum", other_than(0.0, 0.9)),
        Exclusion("comm.fragments", above(1)),
        Exclusion("comm.differences", other_than("none", "int16")),
        *not_on_horovod(),
    ),
    rules=(
        Conflict(
            lambda job: GossipKeys.of(job.config).gossip_steps >= job.config.comm.local_steps,
            what="{chosen} has no effect with comm.local_steps={config.comm.local_steps}: all "
            "ranks average first",
            fix="more comm.local_steps, or fewer comm.gossip_steps",
        ),
        needs_engine(
            "p2p",
            what="{chosen} needs sends between ranks, which the {engine} engine does not support",
            fix="comm.engine=mpi with the same mpirun, or comm.engine=torchdist",
            key="comm.engine",
            when=lambda job: "several_ranks" in job.features,
        ),
    ),
)

FEATURES = (Added((GOSSIP,), behind=reduce.LOCAL_SGD),)
ROWS = ()
