"""Rewrite a dataset: hot and cold rows apart (FAE), or new ids (EL-Rec)."""
