"""Transfers between backing stores and devices."""
