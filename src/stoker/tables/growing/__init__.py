"""Tables whose rows are given to raw ids while they train."""
