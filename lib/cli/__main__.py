"""`python -m lib.cli` is the `workbook` command."""

import sys

from lib.cli import main

sys.exit(main())
