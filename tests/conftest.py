"""What all tests share."""

from hypothesis import settings

# How long an example takes says nothing about whether it is right, least of all on a busy machine.
settings.register_profile("stoker", deadline=None)
settings.load_profile("stoker")
