"""``python -m pagemill``."""

import sys

from pagemill.main import main

sys.exit(main())
