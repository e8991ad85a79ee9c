"""From shards to batches: order of rows, gathering, prefetching."""
