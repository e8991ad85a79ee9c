"""From raw logs to datasets."""
