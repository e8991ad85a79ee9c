"""Print the lowest versions that the ranges of pyproject.toml allow, as requirements of pip: python lower_bounds.py.

PyTorch is the one of requirements/runtime.txt: the lowest exists for Linux as a build of several GB for CUDA alone.
Triton follows PyTorch. Of what developers need, only what tests import is listed.
"""

import re
import tomllib
from pathlib import Path

ROOT = Path(__file__).parents[1]
TOOLS = {"hypothesis", "pandas", "pytest", "pytest-timeout"}

project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
extras = project["optional-dependencies"]
wanted = [*project["dependencies"]]
for name, requirements in extras.items():
    if name not in ("all", "dev", "gpu"):
        wanted += requirements
wanted += [each for each in extras["dev"] if re.split("[<>=]", each)[0] in TOOLS]
for requirement in wanted:
    name, lowest = requirement.split(">=")
    if name == "torch":
        lowest = re.search("^torch==(.*)$", (ROOT / "requirements" / "runtime.txt").read_text(), re.MULTILINE)[1]
    print(f"{name}=={lowest}")
