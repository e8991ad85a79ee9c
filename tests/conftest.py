"""What all tests share."""

import signal

import pytest
from fresh_memory import fill_fresh_memory
from hypothesis import settings

pytest.register_assert_rewrite("small_runs")  # so that what it asserts is shown in full, whoever imports it first

# A shell makes what it starts in the background deaf to Ctrl-C, and so all that is started from there.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

# How long an example takes says nothing about whether it is right, least of all on a busy machine.
settings.register_profile("stoker", deadline=None)
settings.load_profile("stoker")

fill_fresh_memory()
