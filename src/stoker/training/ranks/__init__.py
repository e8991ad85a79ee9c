"""Steps in logical shards, which any number of threads computes alike."""
