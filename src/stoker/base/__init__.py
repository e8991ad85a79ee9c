"""Helpers for all packages: errors, units, devices, files, threads."""
