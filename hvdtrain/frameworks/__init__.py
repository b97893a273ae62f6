"""The protocol of a framework (learner.py), and one package or file for each framework."""
