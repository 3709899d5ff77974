"""Prints what pyproject.toml asks for: ``requirements.py [EXTRA…]``, the base dependencies and those of the extras.

So that an image installs its packages in a layer of their own, which changes of the source leave alone.
"""

import sys
import tomllib
from pathlib import Path

project = tomllib.loads((Path(__file__).parents[1] / "pyproject.toml").read_text(encoding="utf-8"))["project"]
extras = project["optional-dependencies"]
print("\n".join(project["dependencies"] + [line for extra in sys.argv[1:] for line in extras[extra]]))
