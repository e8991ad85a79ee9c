"""Where rows should lie: what cache strategies cost on a given stream of ids."""
