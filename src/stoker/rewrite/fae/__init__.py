"""Which rows are hot, and which batches (FAE)."""
