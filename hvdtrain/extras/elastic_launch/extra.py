"""What the rest of hvdtrain learns of launch --elastic."""

from hvdtrain.core.extras import Extra, Mode

_USAGE = """\
hvdtrain launch --elastic [--min 2] [--max 8] [-H n1:4,n2:4 | --hostfile FILE | --hosts-from PROGRAM] -- run=DIR [key=value ...]
hvdtrain launch --elastic ... -- script.py [run=DIR] [arguments]
  --elastic           start the job again from its newest checkpoint where a host or a rank is lost, on the hosts that are left; on more
                      where hosts come. docs/clusters.md. A script that trains in run=DIR is followed there; of another one the
                      exit code counts, and its hosts are never changed while it runs
  --min 2, --max 8    the fewest and the most ranks; default: 1, and all slots
  --hosts-from PROGRAM  a program that prints a host in each line, as n1:4; it is run again every few seconds, as --hostfile is read again
  --patience 10m      how long to wait for --min; then it ends with exit code 84
  --every 5           seconds between two looks at the offered hosts
  --answer 20         seconds after which a host where mpirun cannot start `echo` counts as lost; less where others
                      answer in less than a fifth of that"""  # noqa: E501
EXTRA = Extra(
    status="stable",
    says="Restarts a job from its newest checkpoint when a host or a rank fails.",
    modes={
        "launch --elastic": Mode(
            "hvdtrain.extras.elastic_launch.command",
            _USAGE,
            ("--min", "--max", "--hosts-from", "--patience", "--every", "--answer"),
            hosts=("--hosts-from",),
        )
    },
)
