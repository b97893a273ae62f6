"""The commands of `hvdtrain`: one file or package each."""
