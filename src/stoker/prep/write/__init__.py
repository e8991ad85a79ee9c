"""From columns to shards."""
