"""Helpers for all rooms: errors, units, devices, files, threads."""
