"""Answers words of other tools with the key or value that they mean here."""
