"""Features fitted on training rows."""
