"""How large batches and tables may be."""
