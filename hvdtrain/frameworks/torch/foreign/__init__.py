"""Folders and code of others: what their files may say, what they may download, and how large a
model they may make."""
