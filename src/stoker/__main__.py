"""Run the ``stoker`` command for ``python -m stoker``."""

from __future__ import annotations

from stoker.cli import main

if __name__ == "__main__":
    main()
