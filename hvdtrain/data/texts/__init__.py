"""Chats as text, by the template of a tokenizer's folder."""
