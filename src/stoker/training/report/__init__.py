"""One page about a run: :mod:`analysis` measures what records lack, :mod:`advice` reads it, :mod:`page` draws it."""
