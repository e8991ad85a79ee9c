"""Rows in slots: which are resident, which leave."""
