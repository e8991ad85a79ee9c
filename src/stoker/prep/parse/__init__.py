"""From files to columns."""
