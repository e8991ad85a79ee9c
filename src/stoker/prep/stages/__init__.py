"""What a preparation keeps on disk while it runs."""
