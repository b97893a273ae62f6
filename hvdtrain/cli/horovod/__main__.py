"""python -m hvdtrain.cli.horovod: builds, installs and verifies Horovod."""

from hvdtrain.cli.horovod.build import main

if __name__ == "__main__":
    raise SystemExit(main())
