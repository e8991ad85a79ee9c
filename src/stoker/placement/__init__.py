"""Choose where rows are: in fast memory, in main memory or in a file."""
