"""From a dataset to another: classified batches (FAE), new ids (EL-Rec)."""
