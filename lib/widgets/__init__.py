"""What can be moved in a notebook: planner, chooser, live panel, evidence browser. They show; no result depends on them.

Each leaves a sentence, a table and a picture in every output, live or not (`panel`); what each number is computed from
is in docs/widgets.md.
"""

from __future__ import annotations

from lib.widgets.browser import evidence_browser
from lib.widgets.chooser import flag_chooser
from lib.widgets.livebench import live_panel
from lib.widgets.planner import capacity_planner

__all__ = ["capacity_planner", "evidence_browser", "flag_chooser", "live_panel"]
