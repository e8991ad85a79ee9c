"""Tables stored as tensor trains."""
