"""Steps in logical shards, with the same results on any number of threads."""
