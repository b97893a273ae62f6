"""The commands of `python -m hvdtrain`: one file or package each."""
