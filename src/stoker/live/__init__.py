"""Update models with new rows: updates, their segments, followers."""
