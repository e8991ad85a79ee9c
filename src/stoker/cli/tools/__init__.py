"""Commands around training: verify, trace, compare, find-lr."""
