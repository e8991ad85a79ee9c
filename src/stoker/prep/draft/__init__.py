"""Schemas as text: the draft for a log that nobody has described yet, and any schema as TOML."""
