"""Texts of records, from JSON lines or columns of tables, as tokens: documents, classes, chats."""
