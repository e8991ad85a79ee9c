"""From raw logs to batches: schemas, vocabularies, dataset directories, readers, recipes, synthetic logs."""
