"""Run a script whose ``subprocess.run([sys.executable, "-m", ...])`` fork it: ``python forking.py SCRIPT ARGUMENTS``.

What this process has imported need not be imported again, which takes longer than most commands.
"""

from __future__ import annotations

import os
import runpy
import subprocess
import sys
from pathlib import Path


def run_forked(command: list[str], *, cwd: Path, check: bool) -> subprocess.CompletedProcess[str]:
    assert command[:2] == [sys.executable, "-m"]
    assert not check
    sys.stdout.flush()
    child = os.fork()
    if not child:
        code: object = 1
        try:
            os.chdir(cwd)
            sys.argv = command[2:]
            runpy.run_module(command[2], run_name="__main__", alter_sys=True)
            code = 0
        except SystemExit as end:
            code = end.code or 0
        except BaseException:
            sys.excepthook(*sys.exc_info())
        finally:
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(code if isinstance(code, int) else 1)
    return subprocess.CompletedProcess(command, os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))


if __name__ == "__main__":
    subprocess.run = run_forked  # type: ignore[assignment]
    sys.argv = sys.argv[1:]
    runpy.run_path(sys.argv[0], run_name="__main__")
