"""The version of hvdtrain."""

__version__ = "0.1.0"
