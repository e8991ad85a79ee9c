"""Models that live on: daily updates, the delta log, followers."""
