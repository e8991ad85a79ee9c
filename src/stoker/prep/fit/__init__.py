"""What is fitted on training rows: vocabularies, transforms, splits."""
