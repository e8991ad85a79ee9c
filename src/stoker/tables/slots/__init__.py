"""Rows in slots: which are resident, and which are evicted."""
