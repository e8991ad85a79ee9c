"""Files of a run: checkpoints, logs, the run directory."""
