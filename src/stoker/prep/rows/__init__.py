"""Rows on their way from files to features."""
